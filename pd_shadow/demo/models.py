"""Two small Llama models with different tokenizers, chat templates and sizes; random weights, the same for one seed.

Random weights answer nonsense, but they take the time of a model of their size, and their greedy tokens depend on the
whole context, so that equal tokens in two runs mean equal KV. Three choices see to the latter: sharp attention heads
(an even average over thousands of tokens would say nothing), attention outputs as strong as the residual stream, and
an output head that never picks a special or non-ASCII token.
"""

import hashlib
import json
import math
import os
import shutil
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from pd_shadow.common.config import Config

TRAINING_CHARACTERS = 3_000_000

CHATML = """\
{%- for message in messages -%}
{{- '<|im_start|>' + message['role'] + '\\n' + (message['content'] or '') -}}
{%- if not (continue_final_message is defined and continue_final_message and loop.last) -%}
{{- '<|im_end|>\\n' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""

TAGGED = """\
{%- for message in messages -%}
{{- '<|' + message['role'] + '|>\\n' + (message['content'] or '') -}}
{%- if not (continue_final_message is defined and continue_final_message and loop.last) -%}
{{- '<|end|>\\n' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|assistant|>\\n' -}}{%- endif -%}
"""

ROLES = ("system", "user", "assistant", "tool")


class ModelSpec(Config):
    """Shape of one model. `special_tokens` starts with the end-of-text token."""

    name: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int = 64
    chat_template: str
    special_tokens: tuple[str, ...]
    max_model_len: int = 16384
    seed: int = 0

    @property
    def kv_bytes_per_token(self) -> int:
        """Keys and values of all layers, float32."""
        return 2 * 4 * self.layers * self.kv_heads * self.head_dim


SMALL = ModelSpec(
    name="demo-small",
    vocab_size=4096,
    hidden_size=256,
    intermediate_size=512,
    layers=2,
    heads=2,
    kv_heads=1,
    chat_template=CHATML,
    special_tokens=("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
)
LARGE = ModelSpec(
    name="demo-large",
    vocab_size=6144,
    hidden_size=320,
    intermediate_size=640,
    layers=3,
    heads=2,
    kv_heads=1,
    chat_template=TAGGED,
    special_tokens=("<|eos|>", "<|end|>", *(f"<|{role}|>" for role in ROLES)),
)


def build(spec: ModelSpec, cache: Path) -> Path:
    """The model's directory under `cache`, written if it is not there yet; safe for concurrent builders.

    The directory name is a digest of the recipe, so a changed recipe never meets an old build. Takes seconds.
    """
    recipe = hashlib.sha256(Path(__file__).read_bytes() + spec.model_dump_json().encode()).hexdigest()[:12]
    target = cache / f"{spec.name}-{recipe}"
    if target.is_dir():
        return target
    cache.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{spec.name}-", dir=cache))
    try:
        vocabulary = _write_tokenizer(spec, scratch)
        _write_config(spec, scratch)
        _write_weights(spec, vocabulary, scratch)
        try:
            scratch.rename(target)
        except OSError:
            if not target.is_dir():
                raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return target


def stdlib_sources() -> list[Path]:
    """The running interpreter's own standard library modules, sorted by path.

    Tests and site-packages are left out, and so are character tables: they take twice the tokens of code.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    folders_skipped = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__", "encodings"}
    tables = ("stringprep.py", "entities.py", "locale.py", "_casefix.py", "_sysconfigdata")
    found = []
    for folder, folders, files in os.walk(root):
        folders[:] = sorted(set(folders) - folders_skipped)
        found += [Path(folder, name) for name in sorted(files) if name.endswith(".py") and not name.startswith(tables)]
    return found


def _training_texts(spec: ModelSpec) -> list[str]:
    # Each model learns from other files, so that even equal vocabulary sizes would split text differently.
    offset = int.from_bytes(hashlib.sha256(spec.name.encode()).digest()[:4], "big") % 3
    texts: list[str] = []
    characters = 0
    for path in stdlib_sources()[offset::2]:
        text = path.read_text(encoding="utf-8", errors="replace")
        texts.append(text)
        characters += len(text)
        if characters > TRAINING_CHARACTERS:
            break
    return texts


def _write_tokenizer(spec: ModelSpec, folder: Path) -> dict[str, int]:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=spec.vocab_size,
        special_tokens=list(spec.special_tokens),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_training_texts(spec), trainer)
    if tokenizer.get_vocab_size() != spec.vocab_size:
        raise RuntimeError(
            f"{spec.name}: the standard library's sources gave {tokenizer.get_vocab_size()} tokens, not "
            f"{spec.vocab_size}; is this Python installed without its .py files?"
        )
    tokenizer.save(str(folder / "tokenizer.json"))
    end = spec.special_tokens[0]
    _write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": end,
            "pad_token": end,
            "additional_special_tokens": list(spec.special_tokens[1:]),
            "clean_up_tokenization_spaces": False,
            "model_max_length": spec.max_model_len,
            "chat_template": spec.chat_template,
        },
    )
    vocabulary: dict[str, int] = tokenizer.get_vocab()
    return vocabulary


def _write_config(spec: ModelSpec, folder: Path) -> None:
    _write_json(
        folder / "config.json",
        {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": spec.vocab_size,
            "hidden_size": spec.hidden_size,
            "intermediate_size": spec.intermediate_size,
            "num_hidden_layers": spec.layers,
            "num_attention_heads": spec.heads,
            "num_key_value_heads": spec.kv_heads,
            "head_dim": spec.head_dim,
            "max_position_embeddings": spec.max_model_len,
            "rope_theta": 1_000_000.0,
            "rms_norm_eps": 1e-5,
            "hidden_act": "silu",
            "attention_bias": False,
            "tie_word_embeddings": False,
            "eos_token_id": 0,
            "bos_token_id": None,
            "torch_dtype": "float32",
        },
    )


def _write_weights(spec: ModelSpec, vocabulary: dict[str, int], folder: Path) -> None:
    from safetensors.numpy import save_file

    random = np.random.default_rng([spec.seed, *spec.name.encode()])

    def matrix(rows: int, columns: int, gain: float = 1.0) -> np.ndarray[Any, np.dtype[np.float32]]:
        return random.standard_normal((rows, columns), dtype=np.float32) * np.float32(gain / math.sqrt(columns))

    hidden, inner = spec.hidden_size, spec.intermediate_size
    head = spec.head_dim
    ones = np.ones(hidden, dtype=np.float32)
    embedding = random.standard_normal((spec.vocab_size, hidden), dtype=np.float32)
    output = matrix(spec.vocab_size, hidden)
    for token, index in vocabulary.items():
        # The byte-level alphabet spells printable ASCII as itself, space as Ġ and newline as Ċ.
        if token in spec.special_tokens or not token.replace("Ġ", "").replace("Ċ", "").isascii():
            output[index] = 0
    tensors = {
        "model.embed_tokens.weight": embedding,
        "model.norm.weight": ones,
        "lm_head.weight": output,
    }
    for layer in range(spec.layers):
        prefix = f"model.layers.{layer}"
        tensors |= {
            f"{prefix}.input_layernorm.weight": ones,
            f"{prefix}.post_attention_layernorm.weight": ones,
            f"{prefix}.self_attn.q_proj.weight": matrix(spec.heads * head, hidden, 1.6),
            f"{prefix}.self_attn.k_proj.weight": matrix(spec.kv_heads * head, hidden, 1.6),
            f"{prefix}.self_attn.v_proj.weight": matrix(spec.kv_heads * head, hidden),
            f"{prefix}.self_attn.o_proj.weight": matrix(hidden, spec.heads * head, 2.0),
            f"{prefix}.mlp.gate_proj.weight": matrix(inner, hidden),
            f"{prefix}.mlp.up_proj.weight": matrix(inner, hidden),
            f"{prefix}.mlp.down_proj.weight": matrix(hidden, inner),
        }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")

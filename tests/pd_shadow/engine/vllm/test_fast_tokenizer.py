"""What EngineCommand.fast_tokenizer stands on: fastokens gives the tokens that the tokenizers library gives."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from pd_shadow.demo import models

fastokens = pytest.importorskip("fastokens")
transformers = pytest.importorskip("transformers")

AWKWARD = "naïve café\t\r\n\x0b  日本語 🙂🙂 \u200b<|im_end|> <|im_start|>user <|end|>  " + "x" * 3000 + "\n" * 50


@pytest.fixture
def patched() -> Iterator[None]:
    fastokens.patch_transformers()
    yield
    fastokens.unpatch_transformers()


def load(folder: Path) -> object:
    return transformers.AutoTokenizer.from_pretrained(folder)


@pytest.mark.parametrize("spec", [models.SMALL, models.LARGE], ids=lambda spec: spec.name)
def test_a_growing_conversation_has_the_same_tokens(
    spec: models.ModelSpec, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> None:
    folder = models.build(spec, tmp_path_factory.getbasetemp() / "models")
    reference = load(folder)
    request.getfixturevalue("patched")
    fast = load(folder)
    assert type(fast._tokenizer).__module__.startswith("fastokens")  # type: ignore[attr-defined]
    sources = [path.read_text(encoding="utf-8", errors="replace")[:6000] for path in models.stdlib_sources()[:40:5]]
    messages = [{"role": "system", "content": "You are careful."}]
    for number, text in enumerate([*sources, AWKWARD, AWKWARD[::-1]]):
        messages.append({"role": ("user", "assistant")[number % 2], "content": text})
        expected, got = (
            tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)  # type: ignore[attr-defined]
            for tokenizer in (reference, fast)
        )
        assert got == expected
        assert fast.decode(got) == reference.decode(expected)  # type: ignore[attr-defined]

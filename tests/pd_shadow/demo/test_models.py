"""The demo's models: built once, different from each other, append-only templates."""

import json
from pathlib import Path
from typing import Any

import pytest

from pd_shadow.demo.models import LARGE, SMALL, ModelSpec, build, stdlib_sources

jinja2 = pytest.importorskip("jinja2")

MESSAGES = [
    {"role": "system", "content": "You fix bugs."},
    {"role": "user", "content": "Look at this."},
    {"role": "assistant", "content": "reading"},
    {"role": "tool", "content": "def f(): ..."},
]


def render(spec: ModelSpec, messages: list[dict[str, str]], **variables: Any) -> str:
    text: str = jinja2.Template(spec.chat_template).render(
        messages=messages, **{"add_generation_prompt": False, **variables}
    )
    return text


@pytest.mark.parametrize("spec", [SMALL, LARGE], ids=lambda spec: spec.name)
def test_templates_are_append_only(spec: ModelSpec) -> None:
    for length in range(1, len(MESSAGES)):
        shorter = render(spec, MESSAGES[:length])
        assert render(spec, MESSAGES[: length + 1]).startswith(shorter)
        assert render(spec, MESSAGES[:length], add_generation_prompt=True).startswith(shorter)


@pytest.mark.parametrize("spec", [SMALL, LARGE], ids=lambda spec: spec.name)
def test_the_generation_prompt_opens_the_assistants_turn(spec: ModelSpec) -> None:
    asked = render(spec, MESSAGES[:2], add_generation_prompt=True)
    assert render(spec, MESSAGES[:3]).startswith(asked + "reading")
    assert render(spec, MESSAGES[:3], continue_final_message=True) == asked + "reading"


def test_a_second_build_is_the_first_and_two_models_split_text_differently(tmp_path: Path) -> None:
    from tokenizers import Tokenizer

    small, large = build(SMALL, tmp_path), build(LARGE, tmp_path)
    assert build(SMALL, tmp_path) == small
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []
    again = build(SMALL, tmp_path / "elsewhere")
    for name in ("tokenizer.json", "model.safetensors"):
        assert (again / name).read_bytes() == (small / name).read_bytes()
    assert json.loads((large / "config.json").read_text())["vocab_size"] == LARGE.vocab_size
    text = stdlib_sources()[0].read_text()
    ids = [Tokenizer.from_file(str(path / "tokenizer.json")).encode(text).ids for path in (small, large)]
    assert ids[0] != ids[1]

"""Text to tokens and back, and what chat templates promise."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pd_shadow.engine.emulated.tokenizer import LARGEST_ID, Tokenizer

A, B = Tokenizer("a"), Tokenizer("b")
TEXT = st.text(st.characters(exclude_categories=("Cs",)))


@given(TEXT)
def test_text_comes_back(text: str) -> None:
    ids = A.encode(text)
    assert A.decode(ids) == text
    assert all(0 <= each <= LARGEST_ID for each in ids)


@given(TEXT, TEXT)
def test_appending_changes_no_token_but_the_last(text: str, more: str) -> None:
    before, after = A.encode(text), A.encode(text + more)
    kept = max(0, len(before) - 1)
    assert after[:kept] == before[:kept]


@given(st.lists(st.tuples(st.sampled_from(["system", "user", "assistant", "tool", "critic"]), TEXT), min_size=2))
def test_a_conversation_begins_with_every_shorter_one(said: list[tuple[str, str]]) -> None:
    messages = [{"role": role, "content": content} for role, content in said]
    whole = A.chat(messages)
    for length in range(1, len(messages)):
        part = A.chat(messages[:length], generation_prompt=False)
        assert whole[: len(part)] == part


def test_what_the_model_says_is_the_same_tokens_in_the_next_prompt() -> None:
    messages = [{"role": "user", "content": "what?"}]
    said = [A.word(number) for number in (1, 26, 700, 17575)]
    answered = [*messages, {"role": "assistant", "content": A.decode(said)}]
    assert A.chat(answered, generation_prompt=False)[:-1] == A.chat(messages) + A.encode(A.decode(said))
    assert A.encode(A.decode(said)).tolist() == said


def test_an_open_ended_message_is_a_prefix_of_the_whole_one() -> None:
    messages = [{"role": "user", "content": "abcd"}, {"role": "assistant", "content": "efgh"}]
    open_ended = A.chat(messages, generation_prompt=False, continue_final=True)
    assert A.chat(messages, generation_prompt=False)[: len(open_ended)] == open_ended


def test_models_have_no_token_in_common() -> None:
    text = "the same words for both"
    assert all(a != b for a, b in zip(A.encode(text), B.encode(text), strict=True))


def test_a_token_holds_up_to_four_characters() -> None:
    assert len(A.encode("x" * 4001)) == 1001


def test_content_that_is_no_text_is_named() -> None:
    with pytest.raises(ValueError, match=r"messages\.0\.content"):
        A.chat([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}])

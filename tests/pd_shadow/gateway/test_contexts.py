"""What the dispatcher remembers."""

from array import array

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, rule

from pd_shadow.gateway.contexts import Contexts, Conversation, Export
from pd_shadow.gateway.digest import MAX_DIGESTS, TokenRatios, digest
from pd_shadow.gateway.tokens import common_prefix, pack

S = ("", "s")
ids = st.lists(st.integers(0, 3), max_size=40)


def conversation(number: int = 1, tokens: int = 10) -> Conversation:
    return Conversation(number, {}, None, tokens)


@given(ids, ids, ids)
def test_common_prefix(shared: list[int], a: list[int], b: list[int]) -> None:
    left, right = shared + a, shared + b
    expected = next(
        (i for i, (x, y) in enumerate(zip(left, right, strict=False)) if x != y), min(len(left), len(right))
    )
    assert common_prefix(pack(left), pack(right)) == expected
    assert expected >= len(shared)


@given(st.integers(0, 20_000), st.integers(0, 20_000), st.integers(0, 20_000))
def test_common_prefix_of_long_sequences(length_a: int, length_b: int, differs_at: int) -> None:
    a, b = array("i", bytes(4 * length_a)), array("i", bytes(4 * length_b))
    if differs_at < length_b:
        b[differs_at] = 1
    assert common_prefix(a, b) == min(length_a, length_b, differs_at if differs_at < length_b else length_b)


@given(ids, ids, ids)
def test_kept_is_the_better_of_rendering_and_real_prompt(old: list[int], real: list[int], new: list[int]) -> None:
    contexts = Contexts(10, 10_000)
    contexts.put_conversation(S, conversation())
    first = contexts.add_rendering(S, "m", pack(old), None, 5)
    contexts.set_served(S, "m", pack(real))
    second = contexts.add_rendering(S, "m", pack(new), None, 5)
    assert first is not None
    assert second is not None
    assert first[1] == 0
    assert second[0].revision > first[0].revision
    assert second[1] == max(common_prefix(pack(new), pack(old)), common_prefix(pack(new), pack(real)))


def test_a_late_word_about_an_earlier_call_changes_nothing() -> None:
    contexts = Contexts(10, 10_000)
    later = conversation(number=2)
    assert contexts.put_conversation(S, later)
    assert not contexts.put_conversation(S, conversation(number=1))
    assert contexts.conversation(S) is later
    assert contexts.put_conversation(S, conversation(number=2))


def test_renderings_and_prompts_of_forgotten_sessions_are_not_kept() -> None:
    contexts = Contexts(10, 10_000)
    assert contexts.add_rendering(S, "m", pack([1]), None, 0) is None
    contexts.set_served(S, "m", pack([1]))
    assert (len(contexts), contexts.tokens) == (0, 0)


def test_an_export_is_taken_once_for_the_same_prefix_and_in_time() -> None:
    contexts = Contexts(10, 10_000)
    contexts.put_conversation(S, conversation())
    added = contexts.add_rendering(S, "m", pack([1, 2, 3, 4]), None, 0)
    assert added is not None
    rendering = added[0]
    export = Export(rendering.tokens, 2, {"x": 1}, expires_at=10.0)
    contexts.hold_export(S, "m", export)
    assert contexts.take_export(S, "m", rendering, 3, now=0.0) is None
    assert contexts.take_export(S, "m", rendering, 2, now=10.0) is None
    rewritten = contexts.add_rendering(S, "m", pack([1, 9, 3]), None, 0)
    assert rewritten is not None
    assert contexts.take_export(S, "m", rewritten[0], 2, now=0.0) is None
    assert contexts.take_export(S, "m", rendering, 2, now=0.0) is export
    assert contexts.take_export(S, "m", rendering, 2, now=0.0) is None
    contexts.hold_export(S, "m", export)
    contexts.forget_exports()
    assert contexts.take_export(S, "m", rendering, 2, now=0.0) is None


class Bounded(RuleBasedStateMachine):
    """However sessions come and go, the caps hold and the count is right."""

    sessions = Bundle("sessions")

    def __init__(self) -> None:
        super().__init__()
        self.contexts = Contexts(max_sessions=3, max_tokens=100)
        self.number = 0

    @rule(target=sessions, name=st.sampled_from("abcdef"))
    def name(self, name: str) -> tuple[str, str]:
        return ("", name)

    @rule(session=sessions, tokens=st.integers(0, 120))
    def call(self, session: tuple[str, str], tokens: int) -> None:
        self.number += 1
        self.contexts.put_conversation(session, conversation(self.number, tokens))

    @rule(session=sessions, model=st.sampled_from("xy"), tokens=ids)
    def render(self, session: tuple[str, str], model: str, tokens: list[int]) -> None:
        self.contexts.add_rendering(session, model, pack(tokens), None, 0)

    @rule(session=sessions, model=st.sampled_from("xy"), tokens=ids)
    def serve(self, session: tuple[str, str], model: str, tokens: list[int]) -> None:
        self.contexts.set_served(session, model, pack(tokens))

    @rule(session=sessions)
    def drop(self, session: tuple[str, str]) -> None:
        self.contexts.drop(session)
        assert self.contexts.rendering(session, "x") is None

    @invariant()
    def caps_hold(self) -> None:
        assert len(self.contexts) <= 3
        assert 0 <= self.contexts.tokens <= 100
        held = [self.contexts.conversation(("", n)) for n in "abcdef"]
        counted = sum(c.tokens for c in held if c is not None)
        for name in "abcdef":
            for model in "xy":
                rendering = self.contexts.rendering(("", name), model)
                served = self.contexts.served(("", name), model)
                counted += (len(rendering.tokens) if rendering else 0) + (len(served) if served else 0)
        assert counted == self.contexts.tokens


TestBounded = Bounded.TestCase
TestBounded.settings = settings(max_examples=30, stateful_step_count=30)

message = st.fixed_dictionaries({"role": st.sampled_from(["user", "assistant"]), "content": st.text(max_size=30)})


@given(st.lists(message, max_size=6), st.lists(message, min_size=1, max_size=3))
def test_a_longer_history_keeps_its_digests(history: list[dict[str, str]], more: list[dict[str, str]]) -> None:
    short = digest({"messages": history, "tools": [{"a": 1}]}, 4.0)
    long = digest({"messages": history + more, "tools": [{"a": 1}]}, 4.0)
    assert long.messages[: len(short.messages)] == short.messages
    assert long.prompt_tokens >= short.prompt_tokens
    other = digest({"messages": history + more, "tools": [{"a": 2}]}, 4.0)
    assert other.messages[-1].rolling_hash != long.messages[-1].rolling_hash


def test_digests_are_bounded_and_token_prompts_are_exact() -> None:
    many = digest({"messages": [{"role": "user", "content": str(i)} for i in range(5_000)]}, 4.0)
    assert len(many.messages) == MAX_DIGESTS
    assert many.messages[-1].running_tokens == many.prompt_tokens
    assert digest({"prompt": [7] * 3_000}, 4.0).prompt_tokens == 3_000
    text = digest({"prompt": "x" * 10_000}, 4.0)
    assert (text.prompt_tokens, len(text.messages)) == (2_500, 3)
    assert digest({"prompt": "x" * 9_000}, 4.0).messages[:2] == text.messages[:2]


def test_ratios_are_learned_within_bounds() -> None:
    ratios = TokenRatios()
    assert ratios.of("m") == TokenRatios.DEFAULT
    ratios.learn("m", 200, 100)
    assert ratios.of("m") == 2.0
    ratios.learn("m", 10**9, 1)
    assert 2.0 < ratios.of("m") < 6.0
    ratios.learn("m", 0, 5)
    for i in range(2 * TokenRatios.MAX_MODELS):
        ratios.learn(f"m{i}", 300, 100)
    assert ratios.of(f"m{2 * TokenRatios.MAX_MODELS - 1}") == TokenRatios.DEFAULT

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pd_shadow.engine import session_tag

printable = st.characters().filter(str.isprintable)
names = st.tuples(st.text(printable, max_size=128), st.text(printable, min_size=1, max_size=256))


@given(names)
def test_a_tag_is_plain_ascii_and_leads_back_to_its_session(name: tuple[str, str]) -> None:
    tag = session_tag.encode(*name)
    assert session_tag.decode(tag) == name
    assert tag.isascii()
    assert " " not in tag


@given(names, names)
def test_other_sessions_have_other_tags(one: tuple[str, str], other: tuple[str, str]) -> None:
    assert (session_tag.encode(*one) == session_tag.encode(*other)) == (one == other)


def test_a_slash_in_a_name_is_no_boundary() -> None:
    assert session_tag.encode("a/b", "c") == "a%2Fb/c"
    assert session_tag.encode("", "s 1") == "/s%201"


@pytest.mark.parametrize(
    "tag",
    ["", "no-slash", "tenant/", "a/b/c", "a%2fb/c", "%41/c", "t/%zz", "t/%ff", "t/a b", "t/%00", f"t/{'x' * 257}"],
)
def test_a_string_nobody_encoded_is_no_session(tag: str) -> None:
    with pytest.raises(ValueError, match="expected"):
        session_tag.decode(tag)


@pytest.mark.parametrize("name", [("t", ""), ("t" * 129, "s"), ("t", "s" * 257), ("t\n", "s")])
def test_what_the_api_takes_for_no_session_has_no_tag(name: tuple[str, str]) -> None:
    with pytest.raises(ValueError, match="printable characters"):
        session_tag.encode(*name)

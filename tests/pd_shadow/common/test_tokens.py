"""Token files: what is taken, what is refused at start, what stays in force when a change is unusable."""

from __future__ import annotations

from pathlib import Path

import pytest

from pd_shadow.common.config import ConfigError
from pd_shadow.common.credential_files import MAX_BYTES, CredentialError
from pd_shadow.common.tokens import AcceptedTokens, EnvironmentToken, OwnToken, bearer
from tests.credentials import write


def accepted(path: Path, stale: list[CredentialError] | None = None) -> AcceptedTokens:
    return AcceptedTokens(path, field="auth.x", on_stale=(stale if stale is not None else []).append)


def test_a_file_holds_one_token_a_line_with_comments(tmp_path: Path) -> None:
    path = write(tmp_path / "t", "# rotated in May\n\n  new-token  \r\nold#token\n")
    tokens = accepted(path)
    assert [tokens.accept(t) for t in ("new-token", "old#token", "rotated", "", "new-toke", "new-token ")] == [
        True, True, False, False, False, False,
    ]  # fmt: skip
    assert OwnToken(path, field="x", on_stale=lambda error: None).current() == "new-token"


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (None, "No such file or directory"),
        (b"", "holds no token"),
        (b"# only a comment\n", "holds no token"),
        (b"two words\n", "line 1: a token is 1 to 512 printable ASCII characters without blanks"),
        ("ok\nschlüssel\n".encode(), "line 2: a token is"),
        (b"\xff\xfe", "is not UTF-8 text"),
        (b"x" * 513, "line 1: a token is"),
        (b"x\n" * 10_001, "has 10001 lines; at most 10000"),
        (b"x" * (MAX_BYTES + 1), "is longer than"),
    ],
)
def test_an_unusable_file_is_told_with_field_and_path_and_without_its_content(
    tmp_path: Path, content: bytes | None, why: str
) -> None:
    path = tmp_path / "t"
    if content is not None:
        write(path, content)
    with pytest.raises(CredentialError) as caught:
        accepted(path)
    assert str(caught.value).startswith(f"auth.x: {path}: {why}")
    assert "schl" not in str(caught.value)
    assert "two words" not in str(caught.value)


def test_tokens_change_with_their_file_and_survive_a_bad_one(tmp_path: Path) -> None:
    path = write(tmp_path / "t", "one")
    stale: list[CredentialError] = []
    tokens = accepted(path, stale)
    write(path, "two\none")
    assert (tokens.accept("one"), tokens.accept("two"), stale) == (True, True, [])
    write(path, "two")
    assert (tokens.accept("one"), tokens.accept("two")) == (False, True)
    for unusable in ("", None):
        stale.clear()
        if unusable is None:
            path.unlink()
        else:
            write(path, unusable)
        assert [tokens.accept("two") for _ in range(3)] == [True] * 3
        # Said once per change, not per call.
        assert [error.field for error in stale] == ["auth.x"]
    write(path, "three")
    assert (tokens.accept("two"), tokens.accept("three")) == (False, True)


@pytest.mark.parametrize(
    ("environ", "why"),
    [
        ({}, "holds no token; set it to one"),
        ({"T": " \n"}, "holds no token; set it to one"),
        ({"T": "two words"}, "a token is 1 to 512 printable ASCII"),
        ({"T": "schlüssel"}, "a token is 1 to 512 printable ASCII"),
        ({"T": "x" * 513}, "a token is 1 to 512 printable ASCII"),
    ],
)
def test_an_unusable_variable_is_told_with_field_and_name_and_without_its_content(
    environ: dict[str, str], why: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        EnvironmentToken("T", field="token_env", environ=environ)
    assert str(caught.value).startswith("token_env: $T")
    assert why in str(caught.value)
    assert not any(word in str(caught.value) for word in ("two words", "schl", "xx"))


def test_a_variable_holds_a_token_with_blanks_around_it_cut() -> None:
    assert EnvironmentToken("T", field="x", environ={"T": " abc\n"}).current() == "abc"


@pytest.mark.parametrize(
    ("header", "token"),
    [
        (None, None),
        ("", None),
        ("Bearer", None),
        ("Bearer  ", None),
        ("Basic abc", None),
        ("abc", None),
        ("Bearer abc", "abc"),
        ("bearer  abc ", "abc"),
    ],
)
def test_bearer_headers(header: str | None, token: str | None) -> None:
    assert bearer(header) == token

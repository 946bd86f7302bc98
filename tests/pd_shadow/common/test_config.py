from pathlib import Path

import pytest

from pd_shadow.common.config import Config, ConfigError, load, parse


class Inner(Config):
    top_k: int = 1


class Outer(Config):
    listen: str = "x"
    items: tuple[Inner, ...] = ()
    inner: Inner = Inner()
    maybe: Inner | None = None


def test_overrides_win_and_unset_ones_do_not(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("listen: file\ninner: {top_k: 3}\n")
    config = load(Outer, path, {"listen": "flag", "maybe": None})
    assert (config.listen, config.inner.top_k, config.maybe) == ("flag", 3, None)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"lisen": "x"}, "lisen: unknown key; did you mean 'listen'?"),
        ({"inner": {"topk": 1}}, "inner.topk: unknown key; did you mean 'top_k'?"),
        ({"items": [{"top_k": 1}, {"topp_k": 1}]}, "items.1.topp_k: unknown key; did you mean 'top_k'?"),
        ({"maybe": {"zzzzzzzz": 1}}, "maybe.zzzzzzzz: unknown key; valid keys here: top_k"),
        ({"inner": {"top_k": "many"}}, "inner.top_k: Input should be a valid integer"),
    ],
)
def test_problems_name_the_path_and_the_fix(data: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(Outer, data)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"), [("- a\n- b\n", "expected a mapping"), ("a: [1\n", "not YAML"), ("\tx", "not YAML")]
)
def test_files_that_are_no_settings(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        load(Outer, path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nothing\.yaml: No such file"):
        load(Outer, tmp_path / "nothing.yaml")

from pathlib import Path

import pytest
from pydantic import model_validator

from pd_shadow.common.config import Config, ConfigError, load, parse


class Inner(Config):
    top_k: int = 1


class Checked(Config):
    low: int = 0
    high: int = 9

    @model_validator(mode="after")
    def _ordered(self) -> "Checked":
        if self.low > self.high:
            raise ValueError("low: must not be above high")
        if self.high > 99:
            raise ValueError("both are too large")
        return self


class Outer(Checked):
    listen: str = "x"
    checked: Checked = Checked()
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
        # What a validator says begins with the field it is about, wherever that is.
        ({"low": 10}, "configuration: low: must not be above high"),
        ({"checked": {"low": 10}}, "configuration: checked.low: must not be above high"),
        ({"high": 100}, "configuration: both are too large"),
        ({"checked": {"high": 100}}, "configuration: checked: both are too large"),
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


def from_environment(**environ: str) -> Outer:
    return load(Outer, None, {"listen": None}, prefix="APP", environ=environ)


def test_the_environment_wins_over_the_file_and_the_command_line_over_both(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("listen: file\nlow: 1\ninner: {top_k: 3}\nchecked: {low: 1, high: 5}\n")
    environ = {"APP__LISTEN": "variable", "APP__LOW": "2", "APP__CHECKED__HIGH": "7", "APP__ITEMS": "[{top_k: 4}]"}
    # What platforms set for services and their own ends is none of ours.
    environ |= {"APP_PORT": "tcp://10.0.0.1:1", "APP_SERVICE_HOST": "10.0.0.1", "OTHER__LISTEN": "z"}
    config = load(Outer, path, {"listen": "flag"}, prefix="APP", environ=environ)
    assert (config.listen, config.low, config.inner.top_k, config.checked) == ("flag", 2, 3, Checked(low=1, high=7))
    assert config.items == (Inner(top_k=4),)
    assert load(Outer, path, prefix="APP", environ=environ).listen == "variable"
    assert load(Outer, path, environ=environ).listen == "file"


def test_a_section_may_be_set_whole_and_one_of_its_keys_besides() -> None:
    config = from_environment(APP__CHECKED="{low: 3, high: 4}", APP__CHECKED__HIGH="8", APP__MAYBE="null")
    assert (config.checked, config.maybe) == (Checked(low=3, high=8), None)
    assert from_environment(APP__MAYBE__TOP_K="5").maybe == Inner(top_k=5)


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        ("APP__LISTN", "x", "APP__LISTN: unknown key; did you mean 'listen'?"),
        ("APP__CHECKED__LOWW", "1", "APP__CHECKED__LOWW: unknown key; did you mean 'low'?"),
        ("APP__LISTEN__DEEPER", "1", "APP__LISTEN__DEEPER: unknown key; valid keys here: none"),
        ("APP__", "1", "APP__: unknown key; valid keys here: checked"),
        ("APP__ITEMS", "[1", "APP__ITEMS: not YAML"),
        ("APP__CHECKED__LOW", "many", "checked.low: Input should be a valid integer"),
        ("APP__CHECKED__LOW", "many", "(from APP__CHECKED__LOW)"),
        ("APP__CHECKED", "plain", "checked: Input should be a valid dictionary"),
    ],
)
def test_a_variable_that_cannot_be_is_named(variable: str, value: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        from_environment(**{variable: value})
    assert message in str(caught.value)


def test_a_file_that_is_no_text_is_told(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_bytes(b"\xff")
    with pytest.raises(ConfigError, match="not UTF-8 text"):
        load(Outer, path)

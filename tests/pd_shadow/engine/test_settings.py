"""Settings of the plugin: defaults, what is refused, and with which words."""

from typing import Any

import pytest

from pd_shadow.common.config import ConfigError
from pd_shadow.engine import settings
from pd_shadow.engine.settings import PluginSettings, Role
from pd_shadow.policy.approach import EngineController


@pytest.mark.parametrize("additional", [None, {}, {"other plugin": {"x": 1}}, {"pd_shadow": {}}, "not a mapping"])
def test_without_settings_everything_has_its_default(additional: object) -> None:
    given = settings.from_additional_config(additional)
    assert given == PluginSettings()
    assert (given.role, given.controller, given.reporter) == (None, None, None)
    # The values of the paper, sections 3.2 to 3.5 and 5.1.
    assert (given.minimum_tokens, given.beta, given.routed_delta, given.harvest_delta) == (256, 0.5, 0.025, 0.1)
    assert (given.window_seconds, given.cap_share, given.cold_seconds) == (0.1, 0.25, 5.0)
    slo = given.slo
    assert (slo.ttft_floor_seconds, slo.tpot_floor_seconds, slo.multiple) == (1.0, 0.025, 5.0)


def test_given_ones_win() -> None:
    given = settings.from_additional_config(
        {"pd_shadow": {"role": "prefill", "controller": "eager", "slo": {"multiple": 3}, "cap_share": 0}}
    )
    assert (given.role, given.controller, given.slo.multiple, given.cap_share) == (
        Role.PREFILL, EngineController.EAGER, 3.0, 0.0,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"minimun_tokens": 5}, "minimun_tokens: unknown key; did you mean 'minimum_tokens'?"),
        ({"slo": {"floor": 5}}, "slo.floor: unknown key; valid keys here: multiple, tpot_floor_seconds"),
        ({"controller": "harvest_slo"}, "controller: Input should be 'off', 'harvest', 'harvest-slo'"),
        ({"role": "producer"}, "role: Input should be 'prefill', 'decode' or 'colocated'"),
        ({"minimum_tokens": 0}, "minimum_tokens: Input should be greater than or equal to 1"),
        ({"cap_share": 1.5}, "cap_share: Input should be less than or equal to 1"),
        ({"pinned_share": -0.1}, "pinned_share: Input should be greater than or equal to 0"),
        ({"window_seconds": 0}, "window_seconds: Input should be greater than 0"),
        ({"slo": {"multiple": 0.5}}, "slo.multiple: Input should be greater than or equal to 1"),
        ({"metrics_listen": "9100"}, "metrics_listen: expected HOST:PORT"),
        ({"reporter": {"name": "p0", "url": "http://h"}}, "reporter.controller: Field required"),
        ({"reporter": {"controller": "c:1", "name": "-", "url": "http://h"}}, "reporter.name: String should match"),
        ({"reporter": {"controller": "c:1", "name": "p0", "url": "h:8000"}}, "reporter.url: String should match"),
        (
            {"role": "decode", "controller": "harvest"},
            "controller: a decode instance computes no shadow work; leave it unset, or off",
        ),
        ([], "expected a mapping of settings"),
    ],
)
def test_what_is_refused_is_named_with_the_place_it_was_given_in(given: Any, message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        settings.from_additional_config({"pd_shadow": given})
    assert "additional-config: pd_shadow: " in str(refused.value)
    assert message in str(refused.value)


@pytest.mark.parametrize("controller", [None, "off"])
def test_a_decode_instance_may_say_that_it_computes_nothing(controller: str | None) -> None:
    given = settings.from_additional_config({"pd_shadow": {"role": "decode", "controller": controller}})
    assert given.role is Role.DECODE

"""Configurations of a run: what is refused, and how it is told."""

from pathlib import Path
from typing import Any

import pytest

from pd_shadow.common.config import ConfigError, load, parse
from pd_shadow.policy.approach import Approach
from pd_shadow.sim.config import HardwareSettings, Mode, RunConfig

from .rig import MODELS

GIVEN: dict[str, Any] = {"models": list(MODELS)}


def test_two_models_are_enough() -> None:
    config = parse(RunConfig, GIVEN)
    assert (config.mode, config.approach, config.instances) == (Mode.DISAGGREGATED, Approach.HARVEST_SLO, 4)
    assert hash(config) == hash(parse(RunConfig, GIVEN))


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"models": ["one"]}, "models: Tuple should have at least 2 items"),
        ({"models": ["one"] * 6}, "models: Tuple should have at most 5 items"),
        ({"models": "one"}, "models: Input should be a valid tuple"),
        ({"mode": "split"}, "mode: Input should be 'colocated' or 'disaggregated'"),
        ({"approach": "harvest-sol"}, "approach: Input should be 'no-shadow'"),
        ({"instances": 0}, "instances: Input should be greater than or equal to 1"),
        ({"instances": 65}, "instances: Input should be less than or equal to 64"),
        ({"instances": 1}, "instances: a disaggregated model needs 2 at least"),
        ({"instances": 2, "prefill_instances": 2}, "prefill_instances: 2 of 2 leaves none to decode"),
        ({"mode": "colocated", "prefill_instances": 1}, "prefill_instances: only with mode: disaggregated"),
        ({"approach": "dedicated"}, "approach: dedicated adds a colocated instance; set mode: colocated"),
        ({"load": 0}, "load: Input should be greater than 0"),
        ({"load": float("nan")}, "load: Input should be"),
        ({"load": 1e9}, "load: Input should be less than or equal to 10"),
        ({"seconds": float("inf")}, "seconds: Input should be a finite number"),
        ({"seconds": "long"}, "seconds: Input should be a valid number"),
        ({"warm_up_seconds": -1}, "warm_up_seconds: Input should be greater than or equal to 0"),
        ({"sessions_per_second": 0}, "sessions_per_second: Input should be greater than 0"),
        ({"switch_probability": 1.5}, "switch_probability: Input should be less than or equal to 1"),
        ({"context_window": 100}, "context_window: Input should be greater than or equal to 8192"),
        ({"chunk_tokens": 1}, "chunk_tokens: Input should be greater than or equal to 64"),
        ({"policy": {"margin": 1}}, "policy.margin: Input should be less than 1"),
        ({"policy": {"cap_share": 25}}, "policy.cap_share: Input should be less than or equal to 1"),
        ({"policy": {"top_k": 0}}, "policy.top_k: Input should be greater than or equal to 1"),
        ({"hardware": {"tensor_parallel_factor": 3}}, "hardware.tensor_parallel_factor: Input should be 1, 2, 4 or 8"),
        ({"lode": 1}, "lode: unknown key; did you mean 'mode'?"),
        ({"policy": {"betta": 1}}, "policy.betta: unknown key; did you mean 'beta'?"),
        ({"hardware": {"gpus": 1}}, "hardware.gpus: unknown key; valid keys here: host_gb_per_gpu"),
    ],
)
def test_a_bad_value_is_one_line_with_the_field_and_the_fix(fields: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse(RunConfig, {**GIVEN, **fields}, source="run.yaml")
    assert says in str(error.value)
    assert len(str(error.value).splitlines()) == 1


def test_every_bad_value_is_told() -> None:
    with pytest.raises(ConfigError) as error:
        parse(RunConfig, {"models": [1, "b"], "load": -1, "seeds": 3})
    told = [line.split(": ")[1] for line in str(error.value).splitlines()]
    assert {"models.0", "load", "seeds"} <= set(told)


@pytest.mark.parametrize(
    ("text", "says"),
    [("models: [a", "not YAML"), ("- a", "expected a mapping"), ("", "models: Field required")],
)
def test_a_bad_file_is_named(tmp_path: Path, text: str, says: str) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=f"run.yaml: .*{says}"):
        load(RunConfig, file)


def test_hardware_without_a_host_tier_is_the_same_whatever_that_is() -> None:
    one = HardwareSettings(host_gb_per_gpu=1, host_gb_per_second=2, link_gb_per_second_per_gpu=10)
    assert one.without_host() == HardwareSettings(link_gb_per_second_per_gpu=10)

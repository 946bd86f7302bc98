"""Whole runs of small clusters: what each approach is, and what must hold whatever it is."""

from collections.abc import Sequence

import pytest

from pd_shadow.policy.approach import Approach
from pd_shadow.sim import demand, simulation
from pd_shadow.sim.clock import Clock
from pd_shadow.sim.compare import hit_rate
from pd_shadow.sim.config import Mode, RunConfig
from pd_shadow.sim.engine import Usage
from pd_shadow.sim.sessions import CallRecord
from pd_shadow.sim.simulation import RunResult, check, deployment

from .rig import MODELS, outcome, simulated, tiny

EVERYWHERE = [(mode, approach) for mode in Mode for approach in Approach if approach is not Approach.DEDICATED]
EVERYWHERE.append((Mode.COLOCATED, Approach.DEDICATED))
# Contexts of tens of thousands of tokens on one instance with room for two of them.
TIGHT = {
    "models": ("Gemma-7B", "Mixtral-8x7B-Instruct-v0.1"),
    "trace": "GHCP-coding",
    "mode": Mode.COLOCATED,
    "instances": 1,
    "seconds": 60,
    "sessions_per_second": 0.05,
    "seed": 1,
}


def switches(result: RunResult) -> list[CallRecord]:
    return [call for call in result.calls if call.switch]


def usage(result: RunResult) -> Usage:
    """Of all instances together."""
    each = [instance.usage for instance in result.instances]
    return Usage(*(sum(getattr(one, name) for one in each) for name in Usage.__dataclass_fields__))


def asked(result: RunResult) -> set[tuple[object, ...]]:
    """What the sessions' calls were, apart from how they fared."""
    return {(call.session, call.step, call.model, call.switch, call.prompt, call.output) for call in result.calls}


@pytest.mark.parametrize("mode", Mode)
def test_a_run_is_its_configuration_and_seed(mode: Mode) -> None:
    config = tiny(mode=mode)
    assert simulated(config) == outcome(mode=mode)
    assert asked(outcome(mode=mode, seed=1)) != asked(outcome(mode=mode))


@pytest.mark.parametrize(("mode", "approach"), EVERYWHERE)
def test_every_approach_meets_the_same_calls_and_requests(mode: Mode, approach: Approach) -> None:
    result = outcome(mode=mode, approach=approach)
    assert not result.overloaded
    assert asked(result) == asked(outcome(approach=Approach.NO_SHADOW))
    assert result.normal.requests == outcome(approach=Approach.NO_SHADOW).normal.requests
    assert len(switches(result)) > 5


@pytest.mark.parametrize(("mode", "approach"), EVERYWHERE)
def test_a_call_finds_no_more_than_it_shares(mode: Mode, approach: Approach) -> None:
    shared = shared_tokens(tiny(mode=mode, approach=approach))
    for call in outcome(mode=mode, approach=approach).calls:
        assert 0 <= call.cached <= min(shared[call.session, call.step], call.prompt - 1)
        assert 0 < call.ttft <= call.latency


@pytest.mark.parametrize("mode", Mode)
@pytest.mark.parametrize("approach", [Approach.ORACLE, Approach.ORACLE_HOST])
def test_the_oracle_finds_all_that_every_switch_call_shares(mode: Mode, approach: Approach) -> None:
    shared = shared_tokens(tiny(mode=mode))
    result = outcome(mode=mode, approach=approach)
    assert [call.cached for call in switches(result)] == [
        min(shared[call.session, call.step], call.prompt - 1) for call in switches(result)
    ]
    assert usage(result).shadow_tokens == 0


@pytest.mark.parametrize("mode", Mode)
@pytest.mark.parametrize("approach", [Approach.NO_SHADOW, Approach.HOST_TIER])
def test_without_shadow_work_nothing_is_computed_or_moved_for_it(mode: Mode, approach: Approach) -> None:
    result = outcome(mode=mode, approach=approach)
    assert usage(result).shadow_tokens == usage(result).shadow_iterations == 0
    assert result.shadow_link_bytes == 0
    assert (result.normal_link_bytes > 0) is (mode is Mode.DISAGGREGATED)


@pytest.mark.parametrize("mode", Mode)
@pytest.mark.parametrize(
    "approach", [Approach.HARVEST, Approach.HARVEST_SLO, Approach.HARVEST_SLO_HOST, Approach.WARM_FIRST]
)
def test_harvesting_computes_shadows_and_switch_calls_find_more(mode: Mode, approach: Approach) -> None:
    before, result = outcome(mode=mode, approach=Approach.NO_SHADOW), outcome(mode=mode, approach=approach)
    assert usage(result).shadow_tokens > 1000
    assert hit_rate(switches(result)) > hit_rate(switches(before))
    assert (result.shadow_link_bytes > 0) is (mode is Mode.DISAGGREGATED)


@pytest.mark.parametrize("mode", Mode)
def test_eager_work_is_normal_work(mode: Mode) -> None:
    before, result = outcome(mode=mode, approach=Approach.NO_SHADOW), outcome(mode=mode, approach=Approach.EAGER)
    assert usage(result).shadow_tokens == 0
    assert usage(result).prefill_tokens > usage(before).prefill_tokens
    assert hit_rate(switches(result)) > hit_rate(switches(before))


def test_a_dedicated_instance_does_all_shadow_work_and_nothing_else() -> None:
    result = outcome(mode=Mode.COLOCATED, approach=Approach.DEDICATED)
    extra = [instance for instance in result.instances if instance.name.endswith("-shadow")]
    others = [instance for instance in result.instances if instance not in extra]
    assert [len(extra), len(others)] == [len(MODELS), 2 * len(MODELS)]
    assert sum(instance.usage.shadow_tokens for instance in extra) > 1000
    assert all(instance.usage.shadow_tokens == 0 for instance in others)
    assert all(instance.usage.prefill_tokens == instance.usage.decode_tokens == 0 for instance in extra)
    before = outcome(mode=Mode.COLOCATED, approach=Approach.NO_SHADOW)
    assert hit_rate(switches(result)) > hit_rate(switches(before))


def test_the_predictor_gives_up_on_switches_that_are_rare() -> None:
    rare = {"router": "markov", "switch_probability": 0.02, "seconds": 60}
    predictive, harvest = (outcome(approach=name, **rare) for name in (Approach.PREDICTIVE, Approach.HARVEST))
    assert 0 < usage(predictive).shadow_tokens < usage(harvest).shadow_tokens / 2


def test_the_predictor_without_a_history_does_what_harvest_does() -> None:
    sure = {"router": "markov", "switch_probability": 1.0}
    predictive, harvest = (outcome(approach=name, **sure) for name in (Approach.PREDICTIVE, Approach.HARVEST))
    assert usage(predictive).shadow_tokens > 0
    assert predictive.calls == harvest.calls


def test_top_k_leaves_the_other_models_cold() -> None:
    three = {"models": (*MODELS, "Qwen2.5-7B-Instruct"), "mode": Mode.COLOCATED, "router": "random"}
    every, one = outcome(**three), simulated(tiny(**three, policy={"top_k": 1}))
    assert 0 < usage(one).shadow_tokens < usage(every).shadow_tokens


@pytest.mark.parametrize("count", [3, 4, 5])
def test_up_to_five_models_take_part(count: int) -> None:
    models = ("Qwen2.5-7B-Instruct", "Llama-3.1-8B-Instruct", "Mistral-7B-Instruct-v0.3", "Gemma-2-9B-IT", MODELS[1])
    result = outcome(models=models[-count:], mode=Mode.COLOCATED, sessions_per_second=0.5)
    assert {call.model for call in result.calls} == set(range(count))
    assert usage(result).shadow_tokens > 0


def test_the_host_tier_gives_back_what_a_full_pool_gave_up() -> None:
    cold, kept = (
        simulated(RunConfig.model_validate({**TIGHT, "approach": name})) for name in ("no-shadow", "host-tier")
    )
    assert hit_rate(kept.calls) > hit_rate(cold.calls) + 5


def test_contexts_longer_than_a_pool_are_compacted_first() -> None:
    config = RunConfig.model_validate({**TIGHT, "instances": 2, "sessions_per_second": 0.03})
    pool = min(pools(config))
    end = config.warm_up_seconds + config.seconds
    longest = max(
        call.prompt_tokens + call.output_tokens
        for session in demand.sessions(config, end, config.context_window)
        for call in session.calls
    )
    assert longest > pool
    result = simulation.run(config, [0.1, 0.1], [None, None])
    assert max(call.prompt + call.output for call in result.calls) <= pool
    assert not result.overloaded


def test_an_overloaded_run_ends_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simulation, "LEAST_DRAIN_SECONDS", 10.0)
    config = tiny(mode=Mode.COLOCATED, instances=1, warm_up_seconds=1, seconds=5, sessions_per_second=2)
    result = simulation.run(config, [60.0, 20.0], [None, None])
    assert result.overloaded
    assert 6 + 30 < result.lasted < 6 + 30 + 1
    assert result.normal.attainment < 0.9


def test_traffic_next_to_nothing_is_no_trouble() -> None:
    result = simulation.run(tiny(), [1e-12, 0.0], [1, 1])
    assert not result.overloaded
    assert result.calls
    assert result.normal.requests == 0


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"models": ("L8", "Llama-9000")}, "models: unknown model 'Llama-9000'; did you mean"),
        ({"trace": "fusionbench"}, "trace: unknown 'fusionbench'; did you mean 'FusionBench'"),
        ({"window": "night"}, "window: unknown 'night'"),
        ({"normal": "azure"}, "normal: unknown 'azure'"),
        ({"router": "oracle"}, "router: unknown 'oracle'"),
        ({"models": ("L8", "L8")}, "router: default cannot route these models, random and markov can"),
    ],
)
def test_what_no_run_can_be_made_of_is_told_before(fields: dict[str, object], says: str) -> None:
    check(tiny())
    with pytest.raises(ValueError, match="^" + says.replace("?", r"\?")):
        check(tiny(**fields))


def shared_tokens(config: RunConfig) -> dict[tuple[int, int], int]:
    """By session and step."""
    end = config.warm_up_seconds + config.seconds
    drawn = demand.sessions(config, end, min(pools(config)))
    return {
        (index, step): call.shared_tokens
        for index, session in enumerate(drawn)
        for step, call in enumerate(session.calls)
    }


def pools(config: RunConfig) -> Sequence[int]:
    """Tokens that one instance of each model holds."""
    made = [deployment(config, name, Clock(), 1) for name in config.models]
    return [engine.pool.capacity_tokens for served in made for engine in served.engines]

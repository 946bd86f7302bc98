"""One run: a cluster, normal traffic and agent sessions, from warm-up to the end of the last measured session."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from pd_shadow.perf.latency import IterationLatency
from pd_shadow.perf.models import model
from pd_shadow.policy.approach import TRAITS, Approach, EngineController
from pd_shadow.policy.base import IterationController
from pd_shadow.policy.credit import CreditController
from pd_shadow.policy.prefill_window import PrefillWindowController
from pd_shadow.policy.slack import SlackController
from pd_shadow.policy.switch_prior import SwitchPrior
from pd_shadow.sim import demand
from pd_shadow.sim.clock import Clock
from pd_shadow.sim.colocated import Colocated
from pd_shadow.sim.config import Mode, RunConfig
from pd_shadow.sim.dedicated import Dedicated
from pd_shadow.sim.demand import NormalTraffic
from pd_shadow.sim.deployment import Deployment, Hardware
from pd_shadow.sim.disaggregated import Disaggregated
from pd_shadow.sim.engine import EngineLimits, Usage
from pd_shadow.sim.feeder import Feeder, Normal
from pd_shadow.sim.kv_pool import EvictionUnit
from pd_shadow.sim.sessions import Agents, CallRecord, Shadowing

# A run that takes so many times the measured time to drain is overloaded; tools take their time in short ones, too.
LONGEST_DRAIN = 6.0
LEAST_DRAIN_SECONDS = 600.0
GB = 1e9


@dataclass(frozen=True)
class InstanceUsage:
    """What one instance did in the measured time."""

    name: str
    gpus: int
    usage: Usage


@dataclass(frozen=True)
class RunResult:
    """Everything the reports are made of."""

    config: RunConfig
    calls: Sequence[CallRecord]
    normal: Normal
    instances: Sequence[InstanceUsage]
    # Good routed calls that ended in the measured time.
    good_calls: int
    shadow_link_bytes: float
    normal_link_bytes: float
    # Virtual seconds until the last measured session ended, and events it took.
    lasted: float
    events: int
    # Whether measured sessions were still running when the run was given up.
    overloaded: bool


def check(config: RunConfig) -> None:
    """Raises ValueError, naming the field, for names that no catalogue has and models that do not go together."""
    for name in config.models:
        try:
            hardware(config, name).pool()
        except ValueError as error:
            raise ValueError(f"models: {error}") from error
    demand.profile(config)
    demand.window_load(config)
    demand.router(config)
    # Reads a recording, and finds what is wrong with it.
    demand.NormalTraffic(config, 1.0, 0)


def hardware(config: RunConfig, name: str) -> Hardware:
    """What the model of that name runs on. Raises ValueError for one that the catalogue does not have."""
    settings = config.hardware
    spec = model(name)
    degree = spec.tensor_parallel() * settings.tensor_parallel_factor
    latency = IterationLatency(spec, tensor_parallel=min(degree, 8))
    return Hardware(
        model=spec,
        latency=latency,
        limits=EngineLimits(
            chunk_tokens=config.chunk_tokens,
            minimum_shadow_tokens=config.policy.minimum_tokens,
            host_bytes_per_second=settings.host_gb_per_second * GB * latency.tensor_parallel,
        ),
        cap_share=config.policy.cap_share,
        cold_seconds=config.policy.cold_seconds,
        stale_seconds=_stale_seconds(config),
        keeps_finished=config.keeps_finished,
        evicts=config.evicts,
        extensions_are_normal=_extensions_are_normal(config),
        host_bytes_per_gpu=settings.host_gb_per_gpu * GB if TRAITS[config.approach].host_tier else 0.0,
        link_bytes_per_second_per_gpu=settings.link_gb_per_second_per_gpu * GB,
    )


def deployment(config: RunConfig, name: str, clock: Clock, prefill_instances: int | None) -> Deployment:
    """The instances of one model."""
    made = hardware(config, name)
    if config.approach is Approach.DEDICATED:
        return Dedicated(made, clock, config.instances, config.slo_scale)
    if config.mode is Mode.COLOCATED:
        return Colocated(made, clock, config.instances, lambda: _controller(config), config.slo_scale)
    assert prefill_instances is not None
    decode = config.instances - prefill_instances
    return Disaggregated(made, clock, prefill_instances, decode, lambda: _window(config), config.slo_scale)


def run(config: RunConfig, rates: Sequence[float], prefill_instances: Sequence[int | None]) -> RunResult:
    """Simulate; `rates` are normal requests per second of each model, `prefill_instances` its split.

    Raises ValueError for names that no catalogue has.
    """
    clock = Clock()
    deployments = [
        deployment(config, name, clock, split) for name, split in zip(config.models, prefill_instances, strict=True)
    ]
    begin, end = config.warm_up_seconds, config.warm_up_seconds + config.seconds
    feeders = [
        Feeder(clock, served, NormalTraffic(config, rate, index).draw, (begin, end))
        for index, (served, rate) in enumerate(zip(deployments, rates, strict=True))
    ]
    traits = TRAITS[config.approach]
    shadowing = Shadowing(
        config.approach, traits, traits.gate_probability, config.policy.top_k, config.policy.recomputes
    )
    most_tokens = min(engine.pool.capacity_tokens for served in deployments for engine in served.engines)
    drawn = demand.sessions(config, end, most_tokens)
    measured = range(sum(session.arrival < begin for session in drawn), len(drawn))
    agents = Agents(clock, deployments, shadowing, SwitchPrior(), drawn, measured)
    engines = [(served.hardware.gpus, engine) for served in deployments for engine in served.engines]
    at_begin: list[Usage] = []
    at_end: list[Usage] = []
    clock.at(begin, lambda now: at_begin.extend(replace(engine.usage) for _, engine in engines))
    clock.at(end, lambda now: at_end.extend(replace(engine.usage) for _, engine in engines))
    limit = end + max(LEAST_DRAIN_SECONDS, LONGEST_DRAIN * config.seconds)
    clock.run(lambda: clock.now > end and (not agents.left or clock.now > limit))
    links = [link for served in deployments if isinstance(served, Disaggregated) for link in served.links]
    return RunResult(
        config=config,
        calls=agents.calls,
        normal=sum((feeder.normal for feeder in feeders), Normal()),
        instances=[
            InstanceUsage(engine.name, gpus, after - before)
            for (gpus, engine), before, after in zip(engines, at_begin, at_end, strict=True)
        ],
        good_calls=sum(call.good for call in agents.calls if call.arrived + call.latency < end),
        shadow_link_bytes=sum(link.shadow_bytes for link in links),
        normal_link_bytes=sum(link.normal_bytes for link in links),
        lasted=clock.now,
        events=clock.events,
        overloaded=bool(agents.left),
    )


def _stale_seconds(config: RunConfig) -> float:
    given = config.policy.stale_seconds
    return TRAITS[config.approach].stale_seconds if given is None else given


def _extensions_are_normal(config: RunConfig) -> bool:
    given = config.policy.extensions_are_normal
    return config.evicts is EvictionUnit.ENTRIES if given is None else given


def _controller(config: RunConfig) -> IterationController | None:
    policy = config.policy
    match TRAITS[config.approach].controller:
        case EngineController.HARVEST:
            return CreditController(delta=policy.harvest_delta, beta=policy.beta)
        case EngineController.HARVEST_SLO:
            return SlackController(delta=policy.routed_delta, beta=policy.beta, margin=policy.margin)
        case _:
            return None


def _window(config: RunConfig) -> IterationController | None:
    """Both controllers of colocated instances are one rule on a prefill instance: there are no decodes to stretch."""
    if TRAITS[config.approach].controller in (EngineController.HARVEST, EngineController.HARVEST_SLO):
        return PrefillWindowController(window_seconds=config.policy.window_seconds, margin=config.policy.margin)
    return None

"""What a run is asked: its normal traffic and routed sessions, from the names in its configuration."""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import TypeVar

import numpy as np

from pd_shadow.common.suggestion import unknown
from pd_shadow.perf.models import Trace, model
from pd_shadow.perf.prices import price_of
from pd_shadow.sim.config import RunConfig
from pd_shadow.sim.workload import profiles, traffic
from pd_shadow.sim.workload.base import NormalRequest, Session
from pd_shadow.sim.workload.distributions import LogNormal
from pd_shadow.sim.workload.matrix_routers import CalibratedRouter, MatrixRouter, Policy
from pd_shadow.sim.workload.profiles import SessionProfile
from pd_shadow.sim.workload.routers import AlwaysRouter, MarkovRouter, RandomRouter, Router
from pd_shadow.sim.workload.scores import accuracy as score
from pd_shadow.sim.workload.scores import best, scores, stand_ins
from pd_shadow.sim.workload.sessions import generate_sessions
from pd_shadow.sim.workload.traces import at_rate, read_trace

T = TypeVar("T")
# The parts of a run that are drawn independently, so that every approach meets the same requests.
_NORMAL, _SESSIONS = range(2)


SESSIONS_PER_SECOND: Mapping[str, float] = {
    profiles.GHCP_CODING.name: 0.02,
    profiles.SWE_S7_S32.name: 0.01,
    profiles.SWE_S7_Q72.name: 0.01,
}
OTHER_SESSIONS_PER_SECOND = 0.05
REFERENCE_INSTANCES = 4
"""The paper gives rates for its testbed only, 0.05 on FusionBench and 0.01 on SWE-bench (appendix D.1); for the coding
trace, 0.02 makes a cold switch call take the 19 s that section 5.2 reports."""


class RouterName(StrEnum):
    """Who chooses a call's model."""

    # Accuracy per cost, calibrated to the trace's switch rate in the paper.
    DEFAULT = "default"
    # The decisions of LLMRouter's matrix as they are.
    ACCURACY_PER_COST = "accuracy-per-cost"
    MAX_ACCURACY = "max-accuracy"
    RANDOM = "random"
    # Switches with the configured probability at every step.
    MARKOV = "markov"
    # All calls to the model with the lowest or the highest price (section 5.3).
    ALWAYS_CHEAP = "always-cheap"
    ALWAYS_EXPENSIVE = "always-expensive"


def profile(config: RunConfig) -> SessionProfile:
    """Of the run's sessions. Raises ValueError with the nearest name."""
    found = _named("trace", config.trace, profiles.PROFILES)
    output = LogNormal(config.output_scale * found.output.median, found.output.sigma)
    return found if config.output_scale == 1 else replace(found, output=output)


def window_load(config: RunConfig) -> float:
    """Normal traffic in the run's hour, relative to the peak's."""
    found = _named("normal", config.normal, traffic.PROFILES)
    return found.load[_named("window", config.window, {window.value: window for window in traffic.Window})]


class NormalTraffic:
    """One model's normal traffic, piece by piece; the same for equal seeds, whatever the approach."""

    def __init__(self, config: RunConfig, rate: float, model_index: int) -> None:
        """Raises TraceError for a trace file that cannot be used."""
        self._profile = _named("normal", config.normal, traffic.PROFILES)
        self._rate = rate
        self._rng = np.random.default_rng([config.seed, _NORMAL, model_index])
        self._recorded = None if config.normal_trace is None else at_rate(_recorded(config.normal_trace), rate)
        # Seeds and models begin at different places of a recording.
        self._place = 0 if self._recorded is None else int(self._rng.integers(len(self._recorded)))

    def draw(self, seconds: float) -> list[NormalRequest]:
        """The requests of the next so many seconds, their times from 0 on."""
        if self._recorded is None:
            return traffic.generate(self._profile, self._rate, seconds, self._rng)
        return self._replay(self._recorded, seconds)

    def _replay(self, recorded: Sequence[NormalRequest], seconds: float) -> list[NormalRequest]:
        requests: list[NormalRequest] = []
        now = 0.0
        while now < seconds:
            request = recorded[self._place]
            requests.append(request._replace(arrival=now))
            self._place += 1
            if self._place == len(recorded):
                self._place = 0
                now += 1 / self._rate
            else:
                now += recorded[self._place].arrival - request.arrival
        return requests


@functools.cache
def _recorded(path: Path) -> list[NormalRequest]:
    return read_trace(path)


def sessions(config: RunConfig, seconds: float, most_tokens: int) -> list[Session]:
    """The routed sessions of a run, the same for every approach and kind of cluster.

    Histories are compacted before a call, output included, exceeds `most_tokens`, the smallest KV pool of the run: on
    Gemma-7B the coding trace's longest do not fit into one H100.
    """
    found = profile(config)
    rng = np.random.default_rng([config.seed, _SESSIONS])
    window = min(config.context_window, most_tokens)
    return generate_sessions(found, router(config), len(config.models), session_rate(config), seconds, rng, window)


def session_rate(config: RunConfig) -> float:
    """Sessions that start per second, over all models of the run."""
    if config.sessions_per_second is not None:
        return config.sessions_per_second
    return SESSIONS_PER_SECOND.get(config.trace, OTHER_SESSIONS_PER_SECOND) * config.instances / REFERENCE_INSTANCES


def router(config: RunConfig) -> Router:
    """The run's router. Raises ValueError for an unknown name and for models that it has no decisions of."""
    name = _named("router", config.router, {each.value: each for each in RouterName})
    match name:
        case RouterName.RANDOM:
            return RandomRouter()
        case RouterName.MARKOV:
            if config.switch_probability is None:
                raise ValueError("switch_probability: needed with router: markov, 0 to 1")
            return MarkovRouter(config.switch_probability)
        case RouterName.ALWAYS_CHEAP | RouterName.ALWAYS_EXPENSIVE:
            return AlwaysRouter(_by_price(config)[0 if name is RouterName.ALWAYS_CHEAP else -1])
    try:
        columns = stand_ins(tuple(model(each).name for each in config.models))
        if name is RouterName.DEFAULT:
            return CalibratedRouter(profile(config), columns)
        return MatrixRouter(columns, Policy(name.value))
    except ValueError as error:
        raise ValueError(f"router: {name.value} cannot route these models, random and markov can ({error})") from error


def accuracy(config: RunConfig) -> float:
    """Mean score of the run's router over the queries of its trace's tasks, in percent, tasks weighing the same.

    That of the default router is its matrix's, before it was calibrated. Raises ValueError for routers that know
    nothing of queries, and as `router` does.
    """
    chosen = router(config)
    tasks = profile(config).tasks
    columns = stand_ins(tuple(model(each).name for each in config.models))
    match chosen:
        case AlwaysRouter():
            decisions = {task: np.full(len(scores()[task]), chosen.index) for task in tasks}
        case MatrixRouter() | CalibratedRouter():
            per_cost = not isinstance(chosen, MatrixRouter) or chosen.policy is Policy.ACCURACY_PER_COST
            decisions = {task: best(task, columns, per_cost=per_cost) for task in tasks}
        case _:
            raise ValueError(f"router: {config.router} chooses without looking at queries, so it has no accuracy")
    return 100 * float(np.mean([score(task, columns, decisions[task]) for task in tasks]))


def _by_price(config: RunConfig) -> list[int]:
    """The run's models by what their input costs, the cheapest first."""
    known = Trace(config.trace) if config.trace in list(Trace) else None
    prices = [price_of(model(name), known).input for name in config.models]
    return sorted(range(len(prices)), key=prices.__getitem__)


def _named(key: str, name: str, among: Mapping[str, T]) -> T:
    if name not in among:
        raise ValueError(f"{key}: {unknown('', name, among)}")
    return among[name]

"""Normal traffic on its way into a cluster."""

from collections.abc import Sequence

from pd_shadow.sim.clock import Clock
from pd_shadow.sim.colocated import Colocated
from pd_shadow.sim.feeder import SLAB_SECONDS, Feeder, Normal
from pd_shadow.sim.simulation import hardware
from pd_shadow.sim.workload.base import NormalRequest

from .rig import MODELS, tiny


class Slabs:
    """Draws what it was given, slab by slab, and nothing after that."""

    def __init__(self, *slabs: Sequence[NormalRequest]) -> None:
        self._slabs = list(slabs)

    def __call__(self, seconds: float) -> Sequence[NormalRequest]:
        assert seconds == SLAB_SECONDS
        return self._slabs.pop(0) if self._slabs else []


def fed(slabs: Slabs, measured: tuple[float, float], until: float) -> Feeder:
    clock = Clock()
    served = Colocated(hardware(tiny(mode="colocated"), MODELS[0]), clock, 1, lambda: None)
    feeder = Feeder(clock, served, slabs, measured)
    clock.at(until, lambda now: None)
    clock.run(lambda: clock.now >= until)
    return feeder


def test_requests_of_the_measured_time_count_once_they_end() -> None:
    feeder = fed(Slabs([NormalRequest(at, 1000, 10) for at in (1.0, 5.0, 6.0, 9.9)]), (5.0, 9.9), 20.0)
    assert (feeder.normal.requests, feeder.normal.good, feeder.left) == (2, 2, 0)
    assert 0 < feeder.normal.ttft_seconds < 1


def test_a_request_that_does_not_end_has_missed_its_slos() -> None:
    feeder = fed(Slabs([NormalRequest(1.0, 1000, 1000)]), (0.0, 10.0), 2.0)
    assert (feeder.normal.requests, feeder.left, feeder.normal.attainment) == (1, 1, 0.0)


def test_slabs_follow_each_other_and_may_be_empty() -> None:
    feeder = fed(Slabs([NormalRequest(10.0, 100, 2)], [], [NormalRequest(10.0, 100, 2)]), (0.0, 1e9), 2000.0)
    assert feeder.normal.requests == 2
    early = fed(Slabs([], [], [NormalRequest(10.0, 100, 2)]), (0.0, 1e9), 2 * SLAB_SECONDS + 5)
    assert early.normal.requests == 0


def test_accounts_add_up() -> None:
    assert Normal(1, 1, 0.5, 0.1) + Normal(3, 1, 1.5, 0.2) == Normal(4, 2, 2.0, 0.1 + 0.2)
    assert Normal(4, 2).attainment == 0.5
    assert Normal().attainment == 1.0

"""Instances that compute prompts and generate."""

from collections.abc import Callable, Sequence

from pd_shadow.policy.base import IterationController
from pd_shadow.sim.clock import Clock
from pd_shadow.sim.deployment import Deployment, Hardware
from pd_shadow.sim.engine import Engine


class Colocated(Deployment):
    """`instances` of a model, each with a controller of its own."""

    def __init__(
        self,
        hardware: Hardware,
        clock: Clock,
        instances: int,
        controller: Callable[[], IterationController | None],
        slo_scale: float = 1.0,
    ) -> None:
        super().__init__(hardware, clock, slo_scale)
        self._engines = [
            hardware.engine(f"{hardware.model.name}-{number}", clock, self.slos, controller())
            for number in range(instances)
        ]

    @property
    def engines(self) -> Sequence[Engine]:
        return self._engines

    @property
    def _entries(self) -> Sequence[Engine]:
        return self._engines

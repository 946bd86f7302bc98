"""Colocated instances and one more per model that runs all shadow work (paper Table 2)."""

from collections.abc import Sequence

from pd_shadow.policy.prefill_window import PrefillWindowController
from pd_shadow.sim.clock import Clock
from pd_shadow.sim.colocated import Colocated
from pd_shadow.sim.deployment import Hardware
from pd_shadow.sim.engine import Engine
from pd_shadow.sim.inbound import Inbound
from pd_shadow.sim.shadow_queue import ShadowJob


class Dedicated(Colocated):
    """How shadow KV reaches the serving instance the paper does not say: here as in a disaggregated cluster."""

    def __init__(self, hardware: Hardware, clock: Clock, instances: int, slo_scale: float = 1.0) -> None:
        super().__init__(hardware, clock, instances, lambda: None, slo_scale)
        self._extra = hardware.engine(
            f"{hardware.model.name}-shadow", clock, self.slos, PrefillWindowController()
        )  # fmt: skip
        self._inbound = {
            engine.name: Inbound(
                engine,
                clock,
                bytes_per_second=hardware.link_bytes_per_second,
                bytes_per_token=hardware.model.kv_bytes_per_token,
                held=self._extra.pool.tokens,
            )
            for engine in super().engines
        }

    @property
    def engines(self) -> Sequence[Engine]:
        return [*super().engines, self._extra]

    def suspend(self, session: int) -> None:
        super().suspend(session)
        job = self._jobs.get(session)
        if job is not None and session in self._bound:
            self._inbound[self._bound[session].name].withdraw(job)

    def _shadow_entry(self, session: int, target: int) -> Engine:
        return self._extra

    def _covered(self, job: ShadowJob, now: float) -> None:
        bound = self._bound.get(job.session)
        if bound is None:
            bound = self._place(job.session, job.target, job.target, 0)
        self._inbound[bound.name].offer(job, now)

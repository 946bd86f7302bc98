"""One request on its way through a cluster."""

from collections.abc import Callable
from typing import NamedTuple

from pd_shadow.sim.kv_pool import Lease


class Slo(NamedTuple):
    """Longest time to first token and per output token after it, in seconds (paper section 5.1)."""

    ttft: float
    tpot: float


class Request:
    """Mutable, and touched in every iteration: plain slots."""

    __slots__ = (
        "arrived", "cached", "computed", "context", "done", "finished_at", "first_token_at", "lease", "output",
        "prompt", "ready_at", "reusable", "routed", "shadow", "slo", "started_at_step", "warmed",
    )  # fmt: skip

    def __init__(
        self,
        arrived: float,
        prompt: int,
        output: int,
        slo: Slo,
        *,
        routed: bool = False,
        context: int | None = None,
        reusable: int = 0,
        warmed: int = 0,
        shadow: bool = False,
        done: "Callable[[Request, float], None] | None" = None,
    ) -> None:
        self.arrived = arrived
        self.prompt = prompt
        self.output = output
        self.slo = slo
        self.routed = routed
        self.context = context
        # Tokens of the prompt that an instance which served this context before may hold.
        self.reusable = reusable
        # Tokens that count as found wherever the request goes (Oracle).
        self.warmed = warmed
        # Shadow work that runs as a request like any other (Eager).
        self.shadow = shadow
        # Called when the last token is there.
        self.done = done
        self.lease: Lease | None = None
        # Prompt tokens that were found, and that are found or computed.
        self.cached = 0
        self.computed = 0
        # When what comes from host memory is there.
        self.ready_at = 0.0
        self.first_token_at: float | None = None
        # The instance's count of decode iterations when this one's first was still to come.
        self.started_at_step = 0
        self.finished_at: float | None = None

    @property
    def ttft(self) -> float:
        """Seconds; only once there is a first token."""
        assert self.first_token_at is not None
        return self.first_token_at - self.arrived

    @property
    def tpot(self) -> float:
        """Seconds per token after the first, 0 with one token; transfers between instances count (appendix B)."""
        assert self.first_token_at is not None
        assert self.finished_at is not None
        return (self.finished_at - self.first_token_at) / (self.output - 1) if self.output > 1 else 0.0

    @property
    def meets_slo(self) -> bool:
        """Whether both SLOs were kept."""
        return self.ttft <= self.slo.ttft and self.tpot <= self.slo.tpot

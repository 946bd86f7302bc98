"""Instances: one object per (name, incarnation), its lifecycle, and what this controller has placed on it.

Two rules:

- An instance is a life, never an address. When a name comes back under another incarnation, the old object is GONE for
  good and a new one takes the name; whatever still points to the old life finds a dead object.
- Placed work is counted here at once. Reports lag, so they only ever add what this controller does not know of.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from pd_shadow.api.v1 import common_pb2 as pb
from pd_shadow.api.v1 import engine_pb2 as engine
from transfer.gate import LinkGate
from transfer.ledger import LinkLedger

STARTING = pb.INSTANCE_STATE_STARTING
READY = pb.INSTANCE_STATE_READY
SUSPECT = pb.INSTANCE_STATE_SUSPECT
DRAINING = pb.INSTANCE_STATE_DRAINING
GONE = pb.INSTANCE_STATE_GONE

# Until calls were seen; only comparisons between instances of one model depend on it.
DEFAULT_PREFILL_TOKENS_PER_SECOND = 8000.0
# Shorter prefills measure overhead, not speed.
MIN_TOKENS_FOR_SPEED = 512
SPEED_WEIGHT = 0.2


class InstanceInput(Enum):
    """What can happen to an instance."""

    HEALTHY = "healthy"
    MISSED = "missed"
    LOST = "lost"
    REPLACED = "replaced"


TRANSITIONS: dict[pb.InstanceState.ValueType, dict[InstanceInput, pb.InstanceState.ValueType]] = {
    STARTING: {
        InstanceInput.HEALTHY: READY,
        InstanceInput.MISSED: STARTING,
        InstanceInput.LOST: GONE,
        InstanceInput.REPLACED: GONE,
    },
    READY: {
        InstanceInput.HEALTHY: READY,
        InstanceInput.MISSED: SUSPECT,
        InstanceInput.LOST: GONE,
        InstanceInput.REPLACED: GONE,
    },
    SUSPECT: {
        InstanceInput.HEALTHY: READY,
        InstanceInput.MISSED: SUSPECT,
        InstanceInput.LOST: GONE,
        InstanceInput.REPLACED: GONE,
    },
    GONE: {},
}


class InstanceRef(NamedTuple):
    """One life of one engine replica."""

    name: str
    incarnation: str


@dataclass(frozen=True)
class Facts:
    """What an instance says about itself once per life."""

    incarnation: str
    block_size: int
    hash_algorithm: str = ""
    max_context_tokens: int = 0
    # Of an engine with the plugin.
    plugin_version: str = ""
    vllm_version: str = ""


@dataclass(frozen=True)
class LoadReport:
    """What an instance says about itself again and again.

    A stock engine counts shadow legs among its requests; the plugin counts normal requests only, and says so in its
    own report.
    """

    running: int = 0
    waiting: int = 0
    kv_usage: float = 0.0
    # Since the engine started: transfers that failed under D, exports on P that no D came for.
    failed_transfers: int = 0
    expired_exports: int = 0
    # The whole report of an engine with the plugin.
    plugin: engine.Load | None = None


@dataclass(eq=False)
class Instance:
    """One life of one engine replica, and what is placed on it."""

    name: str
    model: str
    role: pb.Role.ValueType
    url: str
    facts: Facts
    request_level: bool
    created: float
    # Instances of the same value share an accelerator; empty for hardware of its own.
    hardware: str = ""
    state: pb.InstanceState.ValueType = STARTING
    last_seen: float = 0.0
    # Whether anything was heard after its first word, which alone may be the late one of a process that is no more.
    confirmed: bool = False
    misses: int = 0
    load: LoadReport = field(default_factory=LoadReport)
    # Normal calls by id: prompt tokens not computed yet (P), or their presence alone (D).
    prefill_calls: dict[str, int] = field(default_factory=dict)
    decode_calls: set[str] = field(default_factory=set)
    # The prefill and export legs in flight by id; one at most on a stock engine.
    shadow_legs: dict[str, pb.LegKind.ValueType] = field(default_factory=dict)
    fetch_leg: str | None = None
    # The number of the stream the plugin reports on; 0 while there is none.
    stream: int = 0
    # What operators switched for the name: nothing new comes here; no shadow work is done here.
    drained: bool = False
    paused: bool = False
    # Discovery says that this life ends soon.
    leaving: bool = False
    sessions: int = 0
    prefill_tokens_per_second: float = DEFAULT_PREFILL_TOKENS_PER_SECOND
    gate: LinkGate = field(default_factory=LinkGate)
    link: LinkLedger = field(init=False)
    # Every binding here holds this one.
    ref: InstanceRef = field(init=False)
    _own_peak: int = 0
    _fetched_since_report: int = 0
    foreign_requests: int = 0
    # Calls that were in their prefill phase here at the last report.
    _reported_calls: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        self.link = LinkLedger(self.gate, self.created)
        self.ref = InstanceRef(self.name, self.facts.incarnation)

    @property
    def draining(self) -> bool:
        """Whether nothing new comes here, while what runs may end: by an operator's wish, or because its life ends."""
        return self.drained or self.leaving

    @property
    def ready(self) -> bool:
        """Whether calls and legs may be placed here."""
        return self.state == READY and not self.draining

    @property
    def shown_state(self) -> pb.InstanceState.ValueType:
        """The state that others see: what is known of its health, and whether a healthy instance drains."""
        return DRAINING if self.draining and self.state == READY else self.state

    @property
    def alive(self) -> bool:
        return self.state != GONE

    @property
    def colocated(self) -> bool:
        """Whether prompts are computed where answers are generated."""
        return self.role == pb.ROLE_COLOCATED

    @property
    def calls(self) -> int:
        """Normal calls here; one on a colocated instance is in both of its maps while its prompt is computed."""
        if not self.prefill_calls or not self.decode_calls:
            return len(self.prefill_calls) + len(self.decode_calls)
        return len(self.prefill_calls.keys() | self.decode_calls)

    @property
    def waiting_requests(self) -> int:
        """Normal requests that may be waiting: those of the last report, and calls placed since without a first token.

        A shadow leg that waited at the last report is among them, so the most this gets wrong is one report's delay.
        """
        return self.load.waiting + len(self.prefill_calls.keys() - self._reported_calls)

    @property
    def pending_prefill_tokens(self) -> int:
        return sum(self.prefill_calls.values())

    @property
    def busy(self) -> bool:
        """Whether anything normal runs here, by this controller's count or by the engine's own."""
        return bool(self.prefill_calls or self.decode_calls or self.foreign_requests)

    @property
    def shadow_room_tokens(self) -> int | None:
        """Tokens of KV that shadow work may take here, by the last report and what was sent since; None if unknown."""
        report = self.load.plugin
        if report is None or not report.HasField("shadow_room_tokens"):
            return None
        return max(0, report.shadow_room_tokens - self._fetched_since_report)

    def settled_gate(self, now: float) -> LinkGate:
        """The inbound link's gate for a change of state, the time until now booked under the old state."""
        self.link.settle(now)
        return self.gate

    def pause(self, now: float, *, paused: bool) -> None:
        """Let no shadow work begin here, nor on the inbound link; or let it."""
        self.paused = paused
        self.settled_gate(now).paused = paused

    def apply(self, what: InstanceInput) -> bool:
        """Move along TRANSITIONS; True if the state changed."""
        following = TRANSITIONS[self.state].get(what, self.state)
        changed = following != self.state
        self.state = following
        return changed

    def report(self, load: LoadReport) -> None:
        """Take a load report: requests beyond the most this controller had here since the last one are foreign.

        Comparing with the peak keeps a request that ended just before the report from passing for somebody else's.
        """
        self.load = load
        self._fetched_since_report = 0
        self.foreign_requests = max(0, load.running + load.waiting - max(self._own_peak, self._own_requests()))
        self._own_peak = self._own_requests()
        self._reported_calls = frozenset(self.prefill_calls)

    def note_fetch(self, tokens: int) -> None:
        """A fetch of `tokens` started: its room is taken before the next report says so."""
        self._fetched_since_report += tokens

    def note_own_requests(self) -> None:
        """Remember the peak of own requests; call after placing anything here."""
        self._own_peak = max(self._own_peak, self._own_requests())

    def observe_prefill(self, tokens: int, seconds: float) -> None:
        """Learn prefill speed from a call that computed `tokens` in `seconds`."""
        if tokens >= MIN_TOKENS_FOR_SPEED and seconds > 0:
            speed = tokens / seconds
            self.prefill_tokens_per_second += SPEED_WEIGHT * (speed - self.prefill_tokens_per_second)

    def _own_requests(self) -> int:
        legs = 0 if self.load.plugin is not None else len(self.shadow_legs) + (self.fetch_leg is not None)
        return self.calls + legs


def partner_conflict(new: Instance, partner: Instance) -> pb.RejectionReason.ValueType | None:
    """Why two instances of a model cannot serve it together, or None.

    Engines with different block sizes or hashes look healthy and then fail, or answer wrongly, request by request. A
    model whose sessions live on one instance or on two, as it comes, would never find them again.
    """
    if new.colocated != partner.colocated:
        return pb.REJECTION_REASON_MIXED_ROLES
    if new.facts.block_size != partner.facts.block_size:
        return pb.REJECTION_REASON_BLOCK_SIZE_MISMATCH
    hashes = {new.facts.hash_algorithm, partner.facts.hash_algorithm} - {""}
    if len(hashes) > 1:
        return pb.REJECTION_REASON_HASH_ALGORITHM_MISMATCH
    return None

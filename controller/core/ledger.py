"""The two ledgers that are always shown together: what shadow work cost and brought, and what calls got.

Shadow tokens are conserved: prefilled = hit + wasted + resident.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from pd_shadow.api.v1 import common_pb2 as pb


@dataclass
class ShadowLedger:
    """Shadow tokens since the controller started, by what became of them."""

    prefilled: int = 0
    pushed: int = 0
    hit: int = 0
    wasted: int = 0
    by_waste_reason: Counter[pb.ShadowReason.ValueType] = field(default_factory=Counter)

    @property
    def resident(self) -> int:
        return self.prefilled - self.hit - self.wasted

    def waste(self, tokens: int, reason: pb.ShadowReason.ValueType) -> None:
        if tokens:
            self.wasted += tokens
            self.by_waste_reason[reason] += tokens


@dataclass
class CallLedger:
    """Calls since the controller started."""

    calls: int = 0
    switches: int = 0
    handed_off: int = 0
    recomputed: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    switch_prompt_tokens: int = 0
    switch_cached_tokens: int = 0
    # (model, outcome), (model, role, reason), (model, reason) and (model, kind, outcome): bounded by the models known.
    outcomes: Counter[tuple[str, pb.CallOutcome.ValueType]] = field(default_factory=Counter)
    placements: Counter[tuple[str, pb.Role.ValueType, pb.PlacementReason.ValueType]] = field(default_factory=Counter)
    recompute_reasons: Counter[tuple[str, pb.RecomputeReason.ValueType]] = field(default_factory=Counter)
    handed_off_by_model: Counter[str] = field(default_factory=Counter)
    # Links put in quarantine, failed probes included, by model.
    quarantines: Counter[str] = field(default_factory=Counter)
    legs: Counter[tuple[str, pb.LegKind.ValueType, pb.LegOutcome.ValueType]] = field(default_factory=Counter)

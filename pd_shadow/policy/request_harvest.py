"""Request-level harvesting on stock engines: a shadow leg runs only on a prefill instance that has no normal work.

Instances that share an accelerator count as one: normal work on any of them is normal work on all.

This is the admission of the paper's own prototype (appendix D.1: empty waiting queue, one shadow in flight per
instance), tightened by section 3.5: nothing normal may be running either. Engines with the plugin decide inside every
iteration instead.
"""

from enum import Enum
from typing import NamedTuple


class Verdict(Enum):
    """Whether a shadow leg may start now; the names are those of the API's ShadowReason, but for ADMIT."""

    ADMIT = "admit"
    PREFILL_BUSY = "prefill_busy"
    PREFILL_TAKEN = "prefill_taken"
    HARDWARE_BUSY = "hardware_busy"


class PrefillLoad(NamedTuple):
    """What one prefill instance is doing, by the controller's own count and by the engine's last report."""

    # Normal calls in their prefill phase here.
    calls: int
    # Shadow legs in flight here.
    shadow_legs: int
    # Requests the engine reported beyond those the controller knows of.
    foreign_requests: int
    # Whether an instance on the same hardware has normal work.
    neighbour_busy: bool = False


def admit(load: PrefillLoad) -> Verdict:
    """Decide on the start of one more shadow leg."""
    if load.calls or load.foreign_requests:
        return Verdict.PREFILL_BUSY
    if load.shadow_legs:
        return Verdict.PREFILL_TAKEN
    if load.neighbour_busy:
        return Verdict.HARDWARE_BUSY
    return Verdict.ADMIT

"""Request-level harvesting on stock engines: when a shadow leg may start, seen from outside the engine.

Prefill instances: only beside nothing. That is section 3.5 of the paper made strict: nothing normal may be queued, and
nothing normal may run either.

Colocated instances: the admission of the paper's own prototype (appendix D.1), an empty waiting queue and one shadow
leg in flight. Decodes that run do not hold it back; otherwise a busy instance would never take a shadow. That is its
flaw: the leg makes their iterations longer, and nothing bounds by how much. In the paper this admission slowed the
calls of one model pair by 35 % at half load (appendix D, figure 17). Engines with the plugin decide inside every
iteration instead, by the slack of the requests in it; that is what the plugin is for.

On both, one shadow leg runs per instance, and normal work on an accelerator that the instance shares holds it back.
"""

from enum import Enum
from typing import NamedTuple


class Verdict(Enum):
    """Whether a shadow leg may start now; the names are those of the API's ShadowReason, but for ADMIT."""

    ADMIT = "admit"
    # Prefill instances only.
    PREFILL_BUSY = "prefill_busy"
    # Colocated instances only.
    QUEUE_NOT_EMPTY = "queue_not_empty"
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


class ColocatedLoad(NamedTuple):
    """What one colocated instance is doing, as far as its admission looks at it."""

    # Requests that wait by the engine's last report, and calls placed since: each may still be waiting.
    waiting: int
    # Shadow legs in flight here.
    shadow_legs: int
    # Whether an instance on the same hardware has normal work.
    neighbour_busy: bool = False


def admit(load: PrefillLoad) -> Verdict:
    """Decide on the start of one more shadow leg on a prefill instance."""
    if load.calls or load.foreign_requests:
        return Verdict.PREFILL_BUSY
    return _shared(load.shadow_legs, load.neighbour_busy)


def admit_colocated(load: ColocatedLoad) -> Verdict:
    """Decide on the start of one more shadow leg on a colocated instance, whatever it decodes meanwhile."""
    if load.waiting:
        return Verdict.QUEUE_NOT_EMPTY
    return _shared(load.shadow_legs, load.neighbour_busy)


def admit_eager(shadow_legs: int) -> Verdict:
    """Decide for the Eager approach, which holds shadow work back for nobody: one leg per instance is all it keeps."""
    return _shared(shadow_legs, neighbour_busy=False)


def _shared(shadow_legs: int, neighbour_busy: bool) -> Verdict:
    if shadow_legs:
        return Verdict.PREFILL_TAKEN
    return Verdict.HARDWARE_BUSY if neighbour_busy else Verdict.ADMIT

"""Where a call goes: sticky P and D per (session, model), each bound on its own; or one colocated instance.

A colocated instance is placed like P and bound as the prefill side: it holds the context once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from controller.core.instance import Instance, InstanceRef
from controller.core.registry import Registry
from controller.core.session import Binding, Digest
from pd_shadow.api.v1 import common_pb2 as pb
from pd_shadow.policy import placement as policy
from transfer.chunks import whole_blocks


class Placed(NamedTuple):
    """An instance and why it was chosen."""

    instance: Instance
    reason: pb.PlacementReason.ValueType


class PrefillPlacement(NamedTuple):
    placed: Placed | None
    expected_warm_tokens: int
    uncached_tokens: int
    completion_seconds: float


def place_prefill(
    registry: Registry,
    model: str,
    binding: Binding | None,
    prompt_tokens: int,
    digests: tuple[Digest, ...],
    pairs: Callable[[Instance], bool] | None = None,
) -> PrefillPlacement:
    """The prefill or colocated instance with the lowest estimated completion; none when none of the model is ready.

    One that `pairs`, if any does.
    """
    found = registry.ready(model, pb.ROLE_PREFILL, pb.ROLE_COLOCATED)
    fit = [instance for instance in found if pairs(instance)] if pairs else found
    ready = {instance.name: instance for instance in fit or found}
    if not ready:
        return PrefillPlacement(None, 0, prompt_tokens, 0.0)
    sticky = registry.live(binding.prefill) if binding else None
    warm = 0
    if binding is not None and sticky is not None:
        held = binding.expected_warm(digests, binding.prefill_tokens)
        warm = min(whole_blocks(held, sticky.facts.block_size), prompt_tokens)
    if binding is not None and binding.prefill_wished and sticky is not None and sticky.ready:
        ready = {sticky.name: sticky}
    choice = policy.choose(
        [
            policy.Candidate(
                name,
                instance.pending_prefill_tokens,
                instance.prefill_tokens_per_second,
                warm if instance is sticky else 0,
                instance.sessions,
                instance.calls,
            )
            for name, instance in ready.items()
        ],
        prompt_tokens,
        sticky.name if sticky else None,
    )
    chosen = ready[choice.name]
    avoided = sticky is not None and pairs is not None and not pairs(sticky)
    reason = _reason(registry, binding, binding.prefill if binding else None, chosen, "prefill", avoided=avoided)
    return PrefillPlacement(
        Placed(chosen, reason), warm if chosen is sticky else 0, choice.uncached_tokens, choice.completion_seconds
    )


def place_decode(
    registry: Registry, model: str, binding: Binding | None, pairs: Callable[[Instance], bool] | None = None
) -> Placed | None:
    """The sticky decode instance while it is ready, else the one with the fewest calls and sessions.

    One that `pairs`, if any does.
    """
    sticky = registry.live(binding.decode) if binding else None
    chosen = sticky if pairs is None and sticky is not None and sticky.ready else None
    if chosen is None:
        found = registry.ready(model, pb.ROLE_DECODE)
        if not found:
            return None
        fit = [instance for instance in found if pairs(instance)] if pairs else found
        ready = fit or found
        if sticky is not None and sticky in ready:
            chosen = sticky
        else:
            chosen = min(ready, key=lambda instance: (len(instance.decode_calls), instance.sessions, instance.name))
    avoided = sticky is not None and pairs is not None and not pairs(sticky)
    bound = binding.decode if binding else None
    return Placed(chosen, _reason(registry, binding, bound, chosen, "decode", avoided=avoided))


def _reason(
    registry: Registry,
    binding: Binding | None,
    bound: InstanceRef | None,
    chosen: Instance,
    side: str,
    *,
    avoided: bool,
) -> pb.PlacementReason.ValueType:
    if binding is None:
        return pb.PLACEMENT_REASON_NO_SESSION
    if bound is None:
        lost = binding.prefill_lost if side == "prefill" else binding.decode_lost
        return lost or pb.PLACEMENT_REASON_FIRST_CALL
    if bound == chosen.ref:
        wished = binding.prefill_wished if side == "prefill" else binding.decode_wished
        return pb.PLACEMENT_REASON_REBOUND if wished else pb.PLACEMENT_REASON_STICKY
    sticky = registry.live(bound)
    if sticky is not None and sticky.draining:
        return pb.PLACEMENT_REASON_INSTANCE_DRAINING
    if sticky is None or not sticky.ready:
        return pb.PLACEMENT_REASON_INSTANCE_LOST
    return pb.PLACEMENT_REASON_LINK_QUARANTINED if avoided else pb.PLACEMENT_REASON_STICKY_BUSY

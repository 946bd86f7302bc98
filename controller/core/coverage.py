"""Who holds what: the only place that changes a binding's token counts, and the shadow ledger with them."""

from __future__ import annotations

from controller.core.instance import Instance
from controller.core.ledger import ShadowLedger
from controller.core.registry import Registry
from controller.core.session import Binding, Digest, Session
from pd_shadow.api.v1 import common_pb2 as pb
from transfer.chunks import whole_blocks


class Coverage:
    """Moves bindings between instances and books shadow tokens."""

    def __init__(self, registry: Registry, ledger: ShadowLedger) -> None:
        self._registry = registry
        self._ledger = ledger

    def bind_prefill(self, binding: Binding, instance: Instance) -> bool:
        """Bind P, unless the session is to stay where it is; a move leaves everything the old P held behind.

        True if the binding is on the instance now.
        """
        if binding.prefill == instance.ref:
            return True
        if binding.prefill is not None and (binding.prefill_wished or instance.draining):
            return False
        old = self._registry.live(binding.prefill)
        drains = old is not None and old.draining
        self._leave_prefill(binding, pb.SHADOW_REASON_INSTANCE_DRAINING if drains else pb.SHADOW_REASON_INSTANCE_LOST)
        binding.prefill = instance.ref
        binding.prefill_lost = None
        instance.sessions += 1
        return True

    def bind_decode(self, binding: Binding, instance: Instance) -> bool:
        """Bind D as `bind_prefill` binds P."""
        if binding.decode == instance.ref:
            return True
        if binding.decode is not None and (binding.decode_wished or instance.draining):
            return False
        self._leave_decode(binding)
        binding.decode = instance.ref
        binding.decode_lost = None
        instance.sessions += 1
        return True

    def rebind_prefill(self, binding: Binding, instance: Instance | None) -> None:
        """An operator binds P to an instance, for the next call to go there, or to none."""
        self._leave_prefill(binding, pb.SHADOW_REASON_REBOUND)
        binding.prefill_lost = pb.PLACEMENT_REASON_REBOUND
        binding.prefill_wished = instance is not None and self.bind_prefill(binding, instance)

    def rebind_decode(self, binding: Binding, instance: Instance | None) -> None:
        """An operator binds D to an instance, for the next call to go there, or to none."""
        self._leave_decode(binding)
        binding.decode_lost = pb.PLACEMENT_REASON_REBOUND
        binding.decode_wished = instance is not None and self.bind_decode(binding, instance)

    def leave(
        self,
        binding: Binding,
        instance: Instance,
        reason: pb.PlacementReason.ValueType,
        wasted: pb.ShadowReason.ValueType = pb.SHADOW_REASON_INSTANCE_LOST,
    ) -> bool:
        """Unbind what is on an instance that is no more, or that drains; True if the binding was on it."""
        touched = False
        if binding.prefill == instance.ref:
            self._leave_prefill(binding, wasted)
            binding.prefill_lost = reason
            touched = True
        if binding.decode == instance.ref:
            self._leave_decode(binding)
            binding.decode_lost = reason
            touched = True
        return touched

    def prefill_leg_done(self, binding: Binding, instance: Instance, upto: int, computed: int) -> None:
        """A shadow leg made P hold [0, upto), `computed` tokens of it new.

        A leg never moves a binding: if a call bound the session to another P meanwhile, the leg's work is lost.
        """
        self._ledger.prefilled += computed
        if binding.prefill is None:
            self.bind_prefill(binding, instance)
        if binding.prefill != instance.ref:
            self._ledger.waste(computed, pb.SHADOW_REASON_MODEL_IN_USE)
            return
        binding.prefill_tokens = max(binding.prefill_tokens, upto)
        # A call that overtook the leg owns what both computed.
        room = max(0, binding.prefill_tokens - binding.normal_tokens - binding.shadow_resident)
        binding.shadow_resident += min(computed, room)
        self._ledger.waste(max(0, computed - room), pb.SHADOW_REASON_MODEL_IN_USE)

    def fetch_leg_done(self, binding: Binding, instance: Instance, upto: int) -> None:
        """A shadow leg made D hold [0, upto); like a prefill leg, it never moves a binding."""
        if binding.decode is None:
            self.bind_decode(binding, instance)
        if binding.decode != instance.ref:
            return
        self._ledger.pushed += max(0, upto - binding.decode_tokens)
        binding.decode_tokens = max(binding.decode_tokens, upto)

    def call_prefilled(
        self, binding: Binding, instance: Instance, held_tokens: int, cached_tokens: int, digests: tuple[Digest, ...]
    ) -> None:
        """A call computed its prompt on P, found `cached_tokens` there, and leaves `held_tokens`: on P the prompt, on a
        colocated instance its output too.

        What it found beyond earlier calls' own prefix is shadow work that paid; the rest of the shadow never will,
        since from here on the prefix is the call's.
        """
        if binding.prefill == instance.ref:
            hit = min(binding.shadow_resident, max(0, cached_tokens - binding.normal_tokens))
            self._ledger.hit += hit
            self._ledger.waste(binding.shadow_resident - hit, pb.SHADOW_REASON_CUT_BACK)
            binding.shadow_resident = 0
        if not self.bind_prefill(binding, instance):
            return
        binding.prefill_wished = False
        binding.prefill_tokens = binding.normal_tokens = whole_blocks(held_tokens, instance.facts.block_size)
        binding.digests = digests

    def call_decoded(self, binding: Binding, instance: Instance, context_tokens: int) -> None:
        """A call left prompt and output on D; the last token's KV is never written."""
        if not self.bind_decode(binding, instance):
            return
        binding.decode_wished = False
        binding.decode_tokens = whole_blocks(max(0, context_tokens - 1), instance.facts.block_size)

    def cut_back(self, binding: Binding, kept_tokens: int, block_size: int) -> int:
        """The history was rewritten after `kept_tokens`; returns the shadow tokens lost."""
        kept = whole_blocks(kept_tokens, block_size)
        binding.decode_tokens = min(binding.decode_tokens, kept)
        return self._keep_prefill(binding, kept, pb.SHADOW_REASON_CUT_BACK)

    def shrink(self, binding: Binding, instance: Instance, tokens: int) -> None:
        """The instance says that it holds only `tokens` of the context now."""
        kept = whole_blocks(tokens, instance.facts.block_size)
        if binding.decode == instance.ref:
            binding.decode_tokens = min(binding.decode_tokens, kept)
        if binding.prefill == instance.ref:
            self._keep_prefill(binding, kept, pb.SHADOW_REASON_EVICTED)

    def restore(self, binding: Binding, instance: Instance, tokens: int) -> None:
        """An instance that attached holds `tokens` that nothing here knows of; bound sides know better.

        They are nobody's shadow work as far as this ledger goes, and count as if a call had left them.
        """
        kept = whole_blocks(tokens, instance.facts.block_size)
        if not kept:
            return
        if instance.role == pb.ROLE_DECODE:
            if binding.decode is None:
                self.bind_decode(binding, instance)
                binding.decode_tokens = kept
        elif binding.prefill is None:
            self.bind_prefill(binding, instance)
            binding.prefill_tokens = binding.normal_tokens = kept

    def forget(self, session: Session) -> None:
        """Give up everything a session holds."""
        for binding in session.bindings.values():
            self._leave_prefill(binding, pb.SHADOW_REASON_FORGOTTEN)
            self._leave_decode(binding)

    def _keep_prefill(self, binding: Binding, kept: int, reason: pb.ShadowReason.ValueType) -> int:
        """P holds no more than `kept` tokens; returns the shadow tokens lost."""
        lost = min(binding.shadow_resident, max(0, binding.prefill_tokens - max(kept, binding.normal_tokens)))
        self._ledger.waste(lost, reason)
        binding.shadow_resident -= lost
        binding.prefill_tokens = min(binding.prefill_tokens, kept)
        binding.normal_tokens = min(binding.normal_tokens, kept)
        return lost

    def _leave_prefill(self, binding: Binding, reason: pb.ShadowReason.ValueType) -> None:
        self._ledger.waste(binding.shadow_resident, reason)
        old = self._registry.live(binding.prefill)
        if old is not None:
            old.sessions -= 1
        binding.prefill = None
        binding.prefill_wished = False
        binding.prefill_tokens = binding.normal_tokens = binding.shadow_resident = 0
        binding.digests = ()

    def _leave_decode(self, binding: Binding) -> None:
        old = self._registry.live(binding.decode)
        if old is not None:
            old.sessions -= 1
        binding.decode = None
        binding.decode_wished = False
        binding.decode_tokens = 0

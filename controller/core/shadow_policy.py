"""The shadow policy in force: an approach, and what an operator has set beside it."""

from __future__ import annotations

from dataclasses import dataclass

from controller.config import ShadowConfig
from controller.core.effects import Limits
from controller.core.rejection import invalid_field
from pd_shadow.api.v1 import common_pb2 as pb
from pd_shadow.policy import approach as approaches
from pd_shadow.policy.approach import TRAITS, Approach, EngineController, Traits

# What computes shadows.
ROLES = (pb.ROLE_PREFILL, pb.ROLE_DECODE, pb.ROLE_COLOCATED)


@dataclass(frozen=True)
class ShadowPolicy:
    """Whether and what to shadow; `top_k` None for all other models."""

    approach: Approach
    enabled: bool
    gate_probability: float
    top_k: int | None

    @classmethod
    def configured(cls, config: ShadowConfig) -> ShadowPolicy:
        """What the configuration says, the approach's values where it says nothing."""
        traits = TRAITS[config.approach]
        return cls(
            config.approach,
            traits.shadows if config.enabled is None else config.enabled,
            traits.gate_probability if config.gate_probability is None else config.gate_probability,
            config.top_k,
        )

    @property
    def traits(self) -> Traits:
        return TRAITS[self.approach]

    @property
    def eager(self) -> bool:
        """Whether shadow work is held back for nobody."""
        return self.traits.controller is EngineController.EAGER

    def limits(self, role: pb.Role.ValueType) -> Limits:
        """What engines of a role are told."""
        return Limits(controller=self._controller(role), stale_seconds=self.traits.stale_seconds)

    def _controller(self, role: pb.Role.ValueType) -> str | None:
        """Who decides inside an engine with the plugin, by the plugin's own name; nobody where nothing is computed."""
        if role == pb.ROLE_DECODE:
            return None
        if not self.enabled:
            return EngineController.OFF.value
        # Which of the harvesting controllers is a question of decodes, and P has none.
        window = role == pb.ROLE_PREFILL and not self.eager
        return (EngineController.PREFILL_WINDOW if window else self.traits.controller).value

    def changed(
        self,
        *,
        approach: str | None = None,
        enabled: bool | None = None,
        gate_probability: float | None = None,
        top_k: int | None = None,
    ) -> ShadowPolicy:
        """This policy with what is given; an approach brings its own values, `top_k` 0 means all.

        Raises RejectedError, naming the field, for what cannot be.
        """
        chosen, now_enabled, gate = self.approach, self.enabled, self.gate_probability
        if approach is not None:
            try:
                chosen = approaches.named(approach)
            except ValueError as error:
                raise invalid_field("approach", str(error)) from error
            now_enabled, gate = TRAITS[chosen].shadows, TRAITS[chosen].gate_probability
        if enabled is not None:
            now_enabled = enabled
        if now_enabled and not TRAITS[chosen].shadows:
            raise invalid_field("enabled", f"approach {chosen} does no shadow work; set an approach that does")
        if gate_probability is not None:
            if not 0.0 <= gate_probability <= 1.0:
                raise invalid_field("gate_probability", f"is {gate_probability:g}; 0 to 1 is expected")
            gate = gate_probability
        return ShadowPolicy(chosen, now_enabled, gate, self.top_k if top_k is None else top_k or None)

    def __str__(self) -> str:
        state = "enabled" if self.enabled else "paused"
        return f"{self.approach}, {state}, gate {self.gate_probability:g}, top {self.top_k or 'all'}"

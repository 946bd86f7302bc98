"""What the controller knows about a session: how warm every model is for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class ModelWarmth:
    """How warm one model is for one session; the fields are those of the API's ModelWarmth."""

    # Tokens of the context where the prompt would be computed; 0 to 1 of the context.
    prefill_tokens: int
    warm_fraction: float
    # Tokens of the context on the decode instance; 0 for a colocated model.
    decode_tokens: int
    # The context as this model counts it, without the message that comes next.
    context_tokens: int
    # Queue included; infinite when no instance could take a call.
    estimated_prefill_seconds: float
    switch_probability: float

    @property
    def uncached_tokens(self) -> int:
        """Tokens of the context that a call would have to compute."""
        return max(0, self.context_tokens - self.prefill_tokens)


@dataclass(frozen=True)
class SessionWarmth:
    """A session's current model ("" before its first call) and the warmth of every model, likeliest next one first."""

    current_model: str = ""
    models: Mapping[str, ModelWarmth] = field(default_factory=dict)
    # False: the controller did not say.
    known: bool = True


UNKNOWN = SessionWarmth(known=False)
"""The controller did not answer."""
NEW = SessionWarmth()
"""The controller has not met this session."""

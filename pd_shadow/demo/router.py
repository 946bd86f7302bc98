"""The router of the demo: the trace says which model a step prefers, a policy whether a switch is worth it now."""

import enum
from collections.abc import Iterable

from pd_shadow.router import Decision, Policy, SwitchGate, SwitchPrice
from pd_shadow.router.client import AsyncWarmthClient

DEADLINE_SECONDS = 1.0
"""Two cores hold everything here; asking takes no part in what is measured."""
COLD_GAIN = 2.0
"""A step's preference is a gain of 1: a switch is made when its target holds more than half of the context."""
SCORE_PER_SECOND = 8.0
"""A step's preference is worth 1 ÷ this, 125 ms of waiting, in the time that is told."""


class Router(enum.StrEnum):
    """Who decides which model a step goes to."""

    # The trace alone.
    NONE = "none"
    # SwitchPrice and SwitchGate, with the trace's preference as score.
    PRICE = "price"
    GATE = "gate"

    def policy(self, speed: float) -> Policy | None:
        """None for the trace alone. `speed` is that of the engines' time."""
        match self:
            case Router.PRICE:
                # The controller estimates in its own seconds, of which each is `speed` of the engines'.
                return SwitchPrice(score_per_second=SCORE_PER_SECOND * speed)
            case Router.GATE:
                return SwitchGate(cold_gain=COLD_GAIN)
            case Router.NONE:
                return None


class StepRouter:
    """Asks the controller about every step's session, then the policy."""

    def __init__(self, policy: Policy, warmth: AsyncWarmthClient, models: Iterable[str]) -> None:
        self._policy = policy
        self._warmth = warmth
        self._models = tuple(models)

    async def choose(self, session: str, preferred: str) -> Decision:
        """The model for the next step of a session: the preferred one has score 1, the others 0."""
        scores = {model: float(model == preferred) for model in self._models}
        return self._policy.decide(scores, await self._warmth.get(session))

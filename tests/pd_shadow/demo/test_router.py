"""The demo's router: policies behind the option's names, and the session it asks about."""

from __future__ import annotations

from typing import cast

import pytest

from pd_shadow.cli.demo import ROUTERS
from pd_shadow.demo.router import Router, StepRouter
from pd_shadow.router import AsyncWarmthClient, ModelWarmth, Reason, SessionWarmth


class Warmths:
    """A client whose every session is on `small`, and finds `large` this warm."""

    def __init__(self, warm: float, seconds: float) -> None:
        self._large = ModelWarmth(int(1000 * warm), warm, 0, 1000, seconds, 0.5)
        self.asked: list[str] = []

    async def get(self, session_id: str, tenant: str = "") -> SessionWarmth:
        self.asked.append(session_id)
        return SessionWarmth("small", {"small": ModelWarmth(1000, 1.0, 0, 1000, 0.0, 0.5), "large": self._large})


def test_the_command_line_knows_every_router() -> None:
    assert {str(router) for router in Router} == set(ROUTERS)
    assert Router.NONE.policy(1.0) is None


@pytest.mark.parametrize("router", [Router.GATE, Router.PRICE])
@pytest.mark.parametrize(
    ("warm", "seconds", "model", "reason"),
    [
        (0.0, 1.0, "small", Reason.GATE_HELD),
        (0.8, 0.01, "large", Reason.SWITCHED_WORTH_IT),
        (1.0, 0.0, "large", Reason.SWITCHED_WARM),
    ],
)
async def test_a_preference_is_followed_when_its_model_is_warm(
    router: Router, warm: float, seconds: float, model: str, reason: Reason
) -> None:
    policy = router.policy(3.0)
    assert policy is not None
    warmths = Warmths(warm, seconds)
    steps = StepRouter(policy, cast("AsyncWarmthClient", warmths), ("small", "large"))
    decision = await steps.choose("agent-1", "large")
    assert (decision.model, decision.reason) == (model, reason)
    assert (await steps.choose("agent-1", "small")).reason is Reason.KEPT
    assert warmths.asked == ["agent-1", "agent-1"]

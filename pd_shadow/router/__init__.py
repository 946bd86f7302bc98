"""For per-step model routers: what a switch of models costs now, and policies that weigh it against a better score."""

from pd_shadow.router.client import AsyncWarmthClient, WarmthClient
from pd_shadow.router.decision import Decision, Policy, Reason
from pd_shadow.router.gate import SwitchGate
from pd_shadow.router.llmrouter import LLMRouterAdapter
from pd_shadow.router.price import SwitchPrice
from pd_shadow.router.warmth import NEW, UNKNOWN, ModelWarmth, SessionWarmth

__all__ = [
    "NEW",
    "UNKNOWN",
    "AsyncWarmthClient",
    "Decision",
    "LLMRouterAdapter",
    "ModelWarmth",
    "Policy",
    "Reason",
    "SessionWarmth",
    "SwitchGate",
    "SwitchPrice",
    "WarmthClient",
]

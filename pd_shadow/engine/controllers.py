"""Which policy decides the iterations of an engine."""

from pd_shadow.engine.settings import PluginSettings, Role
from pd_shadow.policy.approach import EngineController
from pd_shadow.policy.base import IterationController
from pd_shadow.policy.credit import CreditController
from pd_shadow.policy.prefill_window import PrefillWindowController
from pd_shadow.policy.slack import SlackController

DEFAULTS = {
    Role.PREFILL: EngineController.PREFILL_WINDOW,
    Role.DECODE: EngineController.OFF,
    Role.COLOCATED: EngineController.HARVEST_SLO,
}


def iteration_controller(kind: EngineController, settings: PluginSettings) -> IterationController | None:
    """A fresh controller of that kind; None where iterations carry no shadow work of their own."""
    match kind:
        case EngineController.HARVEST_SLO:
            return SlackController(delta=settings.routed_delta, beta=settings.beta, margin=settings.margin)
        case EngineController.HARVEST:
            return CreditController(delta=settings.harvest_delta, beta=settings.beta)
        case EngineController.PREFILL_WINDOW:
            return PrefillWindowController(window_seconds=settings.window_seconds, margin=settings.margin)
        case EngineController.OFF | EngineController.EAGER:
            return None

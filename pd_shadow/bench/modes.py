"""The four ways to deal with shadow work that are compared."""

import enum
from collections.abc import Mapping
from typing import Any

from pd_shadow.engine import tags

SHADOW_PRIORITY = 1000
SWITCH_PROBABILITY = 0.5
"""The same for all sessions: the engine takes them first come, first served."""


class Mode(enum.StrEnum):
    """An engine, and how shadow requests reach it."""

    # A stock engine that is given no shadow work.
    NO_SHADOW = "no_shadow"
    # An engine with the plugin, which decides every iteration.
    PLUGIN = "plugin"
    # A stock engine; priority scheduling with shadow requests of low priority.
    STOCK_LOW = "stock_low"
    # A stock engine; shadow requests are requests like any other.
    STOCK_EQUAL = "stock_equal"

    @property
    def has_plugin(self) -> bool:
        return self is Mode.PLUGIN

    @property
    def has_shadow(self) -> bool:
        return self is not Mode.NO_SHADOW

    def shadow_fields(self, session: str) -> Mapping[str, Any]:
        """What makes a request of this mode a shadow request."""
        if not self.has_plugin:
            return {"priority": SHADOW_PRIORITY if self is Mode.STOCK_LOW else 0}
        xargs = {
            tags.LEG: tags.LegKind.PREFILL.value,
            tags.PROBABILITY: SWITCH_PROBABILITY,
            tags.SESSION: session,
        }
        return {"priority": SHADOW_PRIORITY, "vllm_xargs": xargs}

"""How requests say what they are: keys of `vllm_xargs`, which vLLM hands to the scheduler as they come."""

import enum
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

PREFIX = "pd_shadow"
"""Every key begins with it; the gateway lets none of a caller's through."""

LEG = "pd_shadow_leg"
PROBABILITY = "pd_shadow_probability"
SESSION = "pd_shadow_session"
ROUTED = "pd_shadow_routed"
TTFT_SLO = "pd_shadow_ttft_slo"
TPOT_SLO = "pd_shadow_tpot_slo"

RESULT = "pd_shadow"
"""Key in the answer's `kv_transfer_params` under which a shadow leg reports `Result`."""


class LegKind(enum.StrEnum):
    """The three legs of shadow work, as in the API's LegKind."""

    PREFILL = "prefill"
    EXPORT = "export"
    FETCH = "fetch"


class ShadowTag(NamedTuple):
    """A shadow leg: what it is, and how likely the session switches to this model next."""

    kind: LegKind
    probability: float
    session: str


class CallTag(NamedTuple):
    """A normal request: whether a router sent it for a session, and SLOs of its own in seconds."""

    routed: bool = False
    session: str = ""
    ttft_slo: float | None = None
    tpot_slo: float | None = None


def shadow_tag(xargs: Mapping[str, Any] | None) -> ShadowTag | None:
    """The shadow tag of a request; None for a normal one, and for a kind this version does not know."""
    if not xargs or LEG not in xargs:
        return None
    try:
        kind = LegKind(str(xargs[LEG]))
    except ValueError:
        return None
    return ShadowTag(kind, _positive(xargs.get(PROBABILITY)) or 0.0, str(xargs.get(SESSION, "")))


def call_tag(xargs: Mapping[str, Any] | None) -> CallTag:
    """The tag of a normal request."""
    if not xargs:
        return CallTag()
    return CallTag(
        bool(xargs.get(ROUTED)),
        str(xargs.get(SESSION, "")),
        _positive(xargs.get(TTFT_SLO)),
        _positive(xargs.get(TPOT_SLO)),
    )


def _positive(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and 0 < value < math.inf else None

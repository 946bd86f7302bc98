"""What the plugin in an engine can be told, under `pd_shadow` in vLLM's --additional-config."""

import enum
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, model_validator

from pd_shadow.common import config
from pd_shadow.common.address import Address, ListenAddress
from pd_shadow.common.config import Config
from pd_shadow.common.tls import ClientTls
from pd_shadow.policy.approach import EngineController
from pd_shadow.policy.base import BETA
from pd_shadow.policy.credit import HARVEST_DELTA, ROUTED_DELTA
from pd_shadow.policy.prefill_window import WINDOW_SECONDS
from pd_shadow.policy.shadow_cache import CAP_SHARE, COLD_SECONDS
from pd_shadow.policy.slack import MARGIN, MINIMUM_TOKENS

KEY = "pd_shadow"

Seconds = Annotated[float, Field(gt=0)]
Share = Annotated[float, Field(ge=0, le=1)]


class Role(enum.StrEnum):
    """What the engine does with a call; the same words as in the controller's static discovery."""

    PREFILL = "prefill"
    DECODE = "decode"
    COLOCATED = "colocated"


class SloSettings(Config):
    """The SLOs that slack is measured against (paper section 5.1); a request may bring its own.

    TTFT: the larger of a floor and a multiple of the isolated prefill time. TPOT: the larger of a floor and a multiple
    of the batch-1 decode time. Both times come from the engine's own latency model.
    """

    ttft_floor_seconds: Seconds = 1.0
    tpot_floor_seconds: Seconds = 0.025
    multiple: float = Field(default=5.0, ge=1)


class ReporterSettings(Config):
    """The controller to attach to, and what the instance is called there."""

    controller: Address
    """HOST:PORT of the controller's gRPC server."""
    controller_tls: ClientTls | None = None
    """TLS to the controller; unset for plain text."""
    controller_token_file: Path | None = None
    """The token to show to the controller, the first one of this file."""
    name: str = Field(min_length=1, max_length=128, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    url: str = Field(pattern=r"^https?://")
    """Base URL of this engine's OpenAI-compatible server, as gateways reach it."""
    hardware: str = Field(default="", max_length=128)
    """Instances of the same value share an accelerator; empty for hardware of its own."""


class PluginSettings(Config):
    """One engine. Lengths are in tokens, shares are of the KV pool."""

    role: Role | None = None
    """Unset: from the KV role (producer: prefill, consumer: decode, neither: colocated)."""
    controller: EngineController | None = None
    """Unset: prefill-window on a prefill instance, harvest-slo on a colocated one. Changeable at run time."""
    minimum_tokens: int = Field(default=MINIMUM_TOKENS, ge=1)
    """Fewer are not worth the overhead they bring to the requests they run beside (n_min of Algorithm 1)."""
    idle_minimum_tokens: int = Field(default=16, ge=1)
    """The same where shadow work runs alone. With one minimum, as in Algorithm 1, long contexts get nothing: the longer
    a context, the fewer of its tokens fit an iteration's budget."""
    beta: Share = BETA
    margin: Share = MARGIN
    routed_delta: Share = ROUTED_DELTA
    harvest_delta: Share = HARVEST_DELTA
    window_seconds: Seconds = WINDOW_SECONDS
    slo: SloSettings = SloSettings()
    cap_share: Share = CAP_SHARE
    """Largest share of the shadow class."""
    cold_seconds: float = Field(default=COLD_SECONDS, ge=0)
    # Normal cached blocks idle for longer are reused before shadow ones; 0: never, as in the paper.
    stale_seconds: float = Field(default=0.0, ge=0)
    """Idle time from which cached blocks may be taken for shadow work."""
    pinned_share: Share = CAP_SHARE
    """Largest share that shadow exports may pin while their readers are on the way."""
    stuck_seconds: Seconds = 30.0
    """A shadow job without progress for this long is ended as it is."""
    trace_file: Path | None = None
    """One JSON line per iteration with shadow work waiting or running."""
    metrics_listen: ListenAddress | None = None
    """HOST:PORT of the plugin's own Prometheus endpoint."""
    reporter: ReporterSettings | None = None
    """Unset: the engine is not attached to any controller."""
    allow_untested_version: bool = False
    """Run on a vLLM minor version the plugin was not tested on."""

    @model_validator(mode="after")
    def _check(self) -> "PluginSettings":
        if self.role is Role.DECODE and self.controller not in (None, EngineController.OFF):
            raise ValueError("controller: a decode instance computes no shadow work; leave it unset, or off")
        return self


def from_additional_config(additional: object) -> PluginSettings:
    """The plugin's part of vLLM's --additional-config; raises ConfigError naming the key and the fix."""
    given: Any = additional.get(KEY, {}) if isinstance(additional, Mapping) else {}
    if not isinstance(given, Mapping):
        raise config.ConfigError(f"additional-config: {KEY}: expected a mapping of settings")
    return config.parse(PluginSettings, given, source=f"additional-config: {KEY}")

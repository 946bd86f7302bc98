"""Configuration of one gateway process."""

from pathlib import Path
from typing import Annotated

from pydantic import Field

from pd_shadow.common.address import Address, ListenAddress
from pd_shadow.common.config import Config
from pd_shadow.common.tls import ClientTls, KeyPairFiles
from pd_shadow.common.tracing import TracingConfig

ENVIRONMENT_PREFIX = "PD_SHADOW_GATEWAY"


Seconds = Annotated[float, Field(gt=0, json_schema_extra={"unit": "seconds"})]
Count = Annotated[int, Field(ge=1)]


class Deadlines(Config):
    """How long the gateway waits for others, in seconds."""

    begin_call: Seconds = 1.0
    """For the controller to place a call; after that the gateway places it itself."""
    end_call: Seconds = 2.0
    """For the controller to take a call's end."""
    connect: Seconds = 2.0
    """For an engine to accept a connection."""
    prefill: Seconds = 120.0
    """One whole P leg, queueing included."""
    decode: Seconds = 3_600.0
    """One whole D leg."""
    decode_silence: Seconds = 120.0
    """The longest silence within a D leg that streams."""
    render: Seconds = 30.0
    """For an engine to render a context for a shadow."""
    shutdown_grace: Seconds = 20.0
    """After SIGTERM, running calls get this long to end."""


class Caps(Config):
    """Bounds on what one gateway holds."""

    body_bytes: Count = 32 * 1024 * 1024
    """Longest request body."""
    in_flight_calls: Count = 4_096
    """Calls beyond are refused."""
    sessions: Count = 4_096
    """Conversations and renderings kept for shadow legs; the least recently used sessions go first."""
    session_tokens: Count = 50_000_000
    """Tokens kept over all sessions."""
    concurrent_renderings: Count = 8
    """Renderings asked of engines at a time."""


class Shadow(Config):
    """How the gateway runs shadow legs."""

    stream_batch_tokens: Count = 256
    """While a call streams, its partial output is rendered for the shadow targets every so many generated tokens."""
    priority: Annotated[int, Field(ge=0)] = 1_000_000
    """Needs engines with --scheduling-policy priority; 0 for engines without."""
    export_hold_seconds: Seconds = 8.0
    """An export is worth a fetch only while P's lease on the blocks lasts; keep this below kv_lease_duration."""


class GatewayConfig(Config):
    """Everything `pd-shadow serve gateway` can be told."""

    controller: Address = "127.0.0.1:7070"
    """The controller's gRPC address, HOST:PORT."""
    controller_tls: ClientTls | None = None
    """TLS to the controller; unset for plain text."""
    controller_token_file: Path | None = None
    """The token to show to the controller, the first one of this file."""
    listen: ListenAddress = "127.0.0.1:8000"
    """Where to serve the OpenAI API, /health, /ready and /metrics, HOST:PORT."""
    tls: KeyPairFiles | None = None
    """TLS of the OpenAI port; unset for plain text."""
    api_keys_file: Path | None = None
    """Clients' bearer keys, one TENANT:KEY a line. Unset: everybody is served, as the tenant named in X-Tenant-ID."""
    tracing: TracingConfig | None = None
    """OpenTelemetry traces; unset for none."""
    deadlines: Deadlines = Deadlines()
    """How long the gateway waits for others."""
    caps: Caps = Caps()
    """Bounds on what one gateway holds."""
    shadow: Shadow = Shadow()
    """How the gateway runs shadow legs."""
    default_block_size: Count = 128
    """Block size assumed of a D instance that reports none, in tokens."""
    assumed_transfer_seconds: Seconds = 1.0
    """A call that does not stream shows no first token: D's inbound link counts as free this long after its D leg
    began.
    """

"""The clients against a real controller, one that is away, and one that is not a controller."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest
import trustme
from structlog.testing import capture_logs

from controller.config import ControllerConfig
from controller.server.app import Controller
from pd_shadow.api.v1 import common_pb2, placement_pb2_grpc
from pd_shadow.api.v1 import placement_pb2 as pb
from pd_shadow.common.credential_files import CredentialError
from pd_shadow.common.tls import ClientTls
from pd_shadow.router import NEW, UNKNOWN, AsyncWarmthClient, SessionWarmth, WarmthClient
from pd_shadow.router.client import AWAY_SECONDS
from tests.controller.server.test_app import add_instance
from tests.credentials import issue, trust, write

MODELS = ("a", "b", "c", "d")


def start(controller: Controller) -> None:
    """Instances of four models; most calls on a were followed by one on c, some by one on b."""
    for model in MODELS:
        add_instance(controller.plane, f"{model}-p0", model, common_pb2.ROLE_PREFILL)
        add_instance(controller.plane, f"{model}-d0", model, common_pb2.ROLE_DECODE)
    with controller.plane.turn() as (cluster, _):
        for following in "ccb":
            cluster.prior.observe("", "a", following)


async def call_once(port: int, model: str = "a", tokens: int = 4096) -> None:
    """A whole call of session s of tenant t."""
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        placement = placement_pb2_grpc.PlacementServiceStub(channel)
        key = common_pb2.SessionKey(tenant="t", session_id="s")
        begun = await placement.BeginCall(
            pb.BeginCallRequest(gateway_id="gw", session=key, model=model, prompt_tokens=tokens)
        )
        await placement.EndCall(
            pb.EndCallRequest(
                call_id=begun.call_id,
                outcome=common_pb2.CALL_OUTCOME_COMPLETED,
                handoff=common_pb2.HANDOFF_HANDED_OFF,
                prompt_tokens=tokens,
                completion_tokens=1,
            )
        )


@pytest.fixture
async def controller() -> AsyncIterator[Controller]:
    config = ControllerConfig(listen="127.0.0.1:0", grace_seconds=0)
    async with Controller(config).running() as running:
        start(running)
        await call_once(running.port)
        yield running


async def ask(
    address: str, session_id: str = "s", tenant: str = "t", **options: object
) -> tuple[SessionWarmth, SessionWarmth]:
    """What the async and the blocking client say; they must say the same."""
    options = {"deadline_seconds": 20.0, **options}
    async with AsyncWarmthClient(address, **options) as client:  # type: ignore[arg-type]
        first = await client.get(session_id, tenant)
    with WarmthClient(address, **options) as blocking:  # type: ignore[arg-type]
        second = await asyncio.to_thread(blocking.get, session_id, tenant)
    return first, second


async def test_every_model_s_warmth_arrives_in_order_of_switch_probability(controller: Controller) -> None:
    for warmth in await ask(f"127.0.0.1:{controller.port}"):
        assert warmth.known
        assert warmth.current_model == "a"
        assert sorted(warmth.models) == list(MODELS)
        assert list(warmth.models).index("c") < list(warmth.models).index("b") < list(warmth.models).index("d")
        assert (warmth.models["a"].warm_fraction, warmth.models["a"].uncached_tokens) == (1.0, 0)
        assert (warmth.models["b"].warm_fraction, warmth.models["b"].uncached_tokens) == (0.0, 4096)
        assert warmth.models["b"].estimated_prefill_seconds > 0


async def test_a_session_belongs_to_its_tenant(controller: Controller) -> None:
    address = f"127.0.0.1:{controller.port}"
    assert await ask(address, tenant="") == (NEW, NEW)
    assert await ask(address, session_id="another") == (NEW, NEW)


@pytest.mark.parametrize("session_id", ["", "x" * 5000, "a\x00b", "\ud800"])
async def test_ids_no_gateway_could_know_are_unknown(controller: Controller, session_id: str) -> None:
    assert await ask(f"127.0.0.1:{controller.port}", session_id=session_id) == (UNKNOWN, UNKNOWN)


async def test_a_controller_away_is_not_asked_again_at_once_and_is_found_when_it_is_back() -> None:
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))
        port = reserved.getsockname()[1]
    now = 0.0
    options = {"deadline_seconds": 20.0, "clock": lambda: now}
    blocking, client = WarmthClient(f"127.0.0.1:{port}", **options), AsyncWarmthClient(f"127.0.0.1:{port}", **options)  # type: ignore[arg-type]
    with capture_logs() as logs:
        for _ in range(3):
            assert await asyncio.to_thread(blocking.get, "s", "t") == await client.get("s", "t") == UNKNOWN
    assert [(line["event"], line["code"]) for line in logs] == [("warmth_unknown", "UNAVAILABLE")] * 2
    async with Controller(ControllerConfig(listen=f"127.0.0.1:{port}", grace_seconds=0)).running() as running:
        start(running)
        await call_once(port)
        # Still within the time in which nobody is asked.
        assert await client.get("s", "t") == UNKNOWN
        now = AWAY_SECONDS
        async with asyncio.timeout(30):
            while (await client.get("s", "t")) == UNKNOWN:
                now += AWAY_SECONDS
                await asyncio.sleep(0.05)
            while (await asyncio.to_thread(blocking.get, "s", "t")) == UNKNOWN:
                now += AWAY_SECONDS
                await asyncio.sleep(0.05)
    blocking.close()
    await client.close()


async def test_a_silent_peer_costs_one_deadline() -> None:
    async def swallow(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    now = 0.0
    async with await asyncio.start_server(swallow, "127.0.0.1", 0) as server:
        address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        async with AsyncWarmthClient(address, deadline_seconds=0.05, clock=lambda: now) as client:
            with capture_logs() as logs:
                assert await client.get("s") == UNKNOWN
                assert await client.get("s") == UNKNOWN
            assert [line["code"] for line in logs] == ["DEADLINE_EXCEEDED"]


async def test_a_closed_client_knows_nothing(controller: Controller) -> None:
    address = f"127.0.0.1:{controller.port}"
    client, blocking = AsyncWarmthClient(address), WarmthClient(address)
    await client.close()
    blocking.close()
    assert await client.get("s", "t") == blocking.get("s", "t") == UNKNOWN


async def test_a_question_under_way_ends_with_its_caller_or_its_client() -> None:
    async def swallow(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.set()
        await reader.read()
        writer.close()

    asked = asyncio.Event()
    async with await asyncio.start_server(swallow, "127.0.0.1", 0) as server:
        address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        client, blocking = AsyncWarmthClient(address, deadline_seconds=20), WarmthClient(address, deadline_seconds=20)
        question = asyncio.create_task(client.get("s"))
        await asked.wait()
        question.cancel()
        with pytest.raises(asyncio.CancelledError):
            await question
        # A closed client is no cancellation of who asked.
        question = asyncio.create_task(client.get("s"))
        asked.clear()
        thread = asyncio.create_task(asyncio.to_thread(blocking.get, "s"))
        await asked.wait()
        await client.close()
        blocking.close()
        assert await question == await thread == UNKNOWN


async def test_tls_and_tokens_are_the_controller_s(tmp_path: Path) -> None:
    ca = trustme.CA()
    ca_file, server = trust(tmp_path, ca), issue(ca, tmp_path, "server")
    accepted = write(tmp_path / "accepted", "good\n")
    config = ControllerConfig.model_validate(
        {
            "listen": "127.0.0.1:0",
            "grace_seconds": 0,
            "tls": server._asdict(),
            "auth": {"gateway_token_file": accepted},
        }
    )
    async with Controller(config).running() as running:
        address, tls = f"127.0.0.1:{running.port}", ClientTls(ca_file=ca_file)
        good = write(tmp_path / "mine", "good")
        assert await ask(address, tls=tls, token_file=good) == (NEW, NEW)
        with capture_logs() as logs:
            bad = write(tmp_path / "other", "bad")
            assert await ask(address, tls=tls, token_file=bad) == (UNKNOWN, UNKNOWN)
        assert [line["code"] for line in logs] == ["UNAUTHENTICATED"] * 2
        async with AsyncWarmthClient(address, tls=tls, token_file=good, deadline_seconds=20) as client:
            assert await client.get("s") == NEW
            # Another authority file, the same authority: a new channel.
            write(ca_file, ca_file.read_bytes() + b"\n")
            assert await client.get("s") == NEW


def test_files_that_cannot_be_used_and_deadlines_of_nothing_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CredentialError, match=r"^token_file: "):
        WarmthClient("127.0.0.1:1", token_file=tmp_path / "none")
    for seconds in (0, float("nan")):
        with pytest.raises(ValueError, match="deadline_seconds"):
            AsyncWarmthClient("127.0.0.1:1", deadline_seconds=seconds)

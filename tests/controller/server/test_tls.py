"""TLS and mTLS of the controller, and certificates that are replaced under load."""

from __future__ import annotations

import asyncio
from pathlib import Path

import grpc
import pytest
import trustme

from controller.config import ControllerConfig
from controller.server.app import Controller
from pd_shadow.api.v1 import common_pb2, placement_pb2_grpc
from pd_shadow.api.v1 import placement_pb2 as pb
from pd_shadow.common.config import ConfigError
from tests.controller.server.test_app import add_instance
from tests.credentials import Pair, chain, der, issue, shown, trust, write


def config(folder: Path, pair: Pair, *, mutual: bool) -> ControllerConfig:
    tls = {**pair._asdict(), **({"client_ca_file": folder / "ca.crt"} if mutual else {})}
    return ControllerConfig.model_validate({"listen": "127.0.0.1:0", "grace_seconds": 0, "tls": tls})


async def watch(port: int, credentials: grpc.ChannelCredentials | None) -> None:
    """One RPC on a connection of its own."""
    address = f"127.0.0.1:{port}"
    plain = credentials is None
    async with (
        grpc.aio.insecure_channel(address) if plain else grpc.aio.secure_channel(address, credentials)
    ) as channel:
        await placement_pb2_grpc.PlacementServiceStub(channel).WatchCluster(pb.WatchClusterRequest(), timeout=20).read()


def client(ca_file: Path, pair: Pair | None) -> grpc.ChannelCredentials:
    key, certificate = (pair.key_file.read_bytes(), pair.cert_file.read_bytes()) if pair else (None, None)
    return grpc.ssl_channel_credentials(ca_file.read_bytes(), key, certificate)


async def test_only_clients_of_the_authority_are_served(tmp_path: Path) -> None:
    ca = trustme.CA()
    ca_file, server = trust(tmp_path, ca), issue(ca, tmp_path, "server")
    stranger = issue(trustme.CA(), tmp_path, "stranger")
    async with Controller(config(tmp_path, server, mutual=True)).running() as controller:
        await watch(controller.port, client(ca_file, issue(ca, tmp_path, "client")))
        for credentials in (None, client(ca_file, None), client(ca_file, stranger)):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await watch(controller.port, credentials)
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_an_unusable_certificate_stops_the_start(tmp_path: Path) -> None:
    server = issue(trustme.CA(), tmp_path, "server")
    write(server.key_file, "")
    with pytest.raises(ConfigError, match=r"^tls\.key_file: .*server\.key: no unencrypted PEM key here"):
        async with Controller(config(tmp_path, server, mutual=False)).running():
            pass


async def test_rotating_everything_under_load_fails_no_call(tmp_path: Path) -> None:
    old = trustme.CA()
    trust(tmp_path, old)
    server, own = issue(old, tmp_path, "server"), issue(old, tmp_path, "client")
    failed: list[BaseException] = []
    done = asyncio.Condition()
    calls = 0

    async def load() -> None:
        """Calls one after another, each on a new connection with the client's files of this moment."""
        nonlocal calls
        while True:
            try:
                await watch(controller.port, client(tmp_path / "ca.crt", own))
            except Exception as error:
                failed.append(error)
            async with done:
                calls += 1
                done.notify_all()

    async def long() -> None:
        """Calls on one connection that lasts."""
        credentials = client(tmp_path / "ca.crt", own)
        async with grpc.aio.secure_channel(f"127.0.0.1:{controller.port}", credentials) as channel:
            placement = placement_pb2_grpc.PlacementServiceStub(channel)
            while True:
                try:
                    begun = await placement.BeginCall(pb.BeginCallRequest(gateway_id="g", model="a", prompt_tokens=1))
                    await placement.EndCall(pb.EndCallRequest(call_id=begun.call_id))
                except grpc.aio.AioRpcError as error:
                    failed.append(error)
                await asyncio.sleep(0)

    async def some_calls() -> None:
        async with done:
            goal = calls + 6
            await done.wait_for(lambda: calls >= goal)

    async with Controller(config(tmp_path, server, mutual=True)).running() as controller:
        for role, name in ((common_pb2.ROLE_PREFILL, "p"), (common_pb2.ROLE_DECODE, "d")):
            add_instance(controller.plane, name, "a", role)
        workers = [asyncio.create_task(work) for work in (load(), load(), long())]
        await some_calls()
        # A new authority in the order docs/security.md gives: trusted first, then used, then alone.
        new = trustme.CA()
        trust(tmp_path, old, new)
        await some_calls()
        for authority in (old, new):
            for pair in (server, own):
                leaf = authority.issue_cert("127.0.0.1")
                if pair is server:
                    write(pair.cert_file, chain(leaf))
                    # Handshakes find a certificate and a key that do not fit.
                    await some_calls()
                    write(pair.key_file, leaf.private_key_pem.bytes())
                else:
                    # The load reads the client's files itself, so they change between two of its reads.
                    write(pair.key_file, leaf.private_key_pem.bytes())
                    write(pair.cert_file, chain(leaf))
                await some_calls()
        trust(tmp_path, new)
        await some_calls()
        assert await asyncio.to_thread(shown, controller.port, own) == der(server.cert_file)
        with pytest.raises(grpc.aio.AioRpcError):
            await watch(controller.port, client(tmp_path / "ca.crt", issue(old, tmp_path, "retired")))
        for worker in workers:
            worker.cancel()
        await asyncio.gather(*workers, return_exceptions=True)
    assert failed == []

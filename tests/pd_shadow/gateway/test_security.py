"""A gateway before a real controller: credentials, their rotation, tenants, and what never reaches logs and metrics."""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import structlog
import trustme

from controller.config import ControllerConfig
from controller.core.instance import Facts, InstanceRef, LoadReport
from controller.core.registry import Declared
from controller.core.rejection import RejectedError
from controller.core.session import SessionKey
from controller.server.app import Controller
from pd_shadow.common.config import ConfigError, parse
from pd_shadow.gateway.app import Gateway
from pd_shadow.gateway.config import GatewayConfig
from tests.credentials import Pair, chain, der, issue, shown, trust, write

from .rig import BLOCK, ROLES, FakeEngine, encode, start_engine

CHAT = "/v1/chat/completions"


@dataclass
class System:
    """A controller, a gateway that knows its cluster, and engines for the models a and b."""

    controller: Controller
    gateway: Gateway
    engines: dict[str, FakeEngine]
    http: aiohttp.ClientSession
    url: str

    async def chat(self, text: str = "hi", key: str = "", **headers: str) -> tuple[int, Any, Any]:
        """(status, JSON, headers) of a call to model a."""
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        if key:
            named["Authorization"] = f"Bearer {key}"
        body = {"model": "a", "messages": [{"role": "user", "content": text}]}
        async with self.http.post(self.url + CHAT, json=body, headers=named) as response:
            return response.status, await response.json(), response.headers


@asynccontextmanager
async def system(
    controller: dict[str, Any] | None = None, gateway: dict[str, Any] | None = None, ca: trustme.CA | None = None
) -> AsyncIterator[System]:
    """A running system; `ca` is trusted for the gateway's port."""
    async with AsyncExitStack() as stack:
        given = {"listen": "127.0.0.1:0", "metrics_listen": "127.0.0.1:0", "grace_seconds": 0, **(controller or {})}
        control = await stack.enter_async_context(Controller(ControllerConfig.model_validate(given)).running())
        engines = {}
        for name in ("a-p", "a-d", "b-p", "b-d"):
            engine = engines[name] = FakeEngine(name)
            await start_engine(stack, engine)
            model, role = name.split("-")
            with control.plane.turn() as (cluster, now):
                cluster.declare(Declared(name, model, ROLES[role], engine.url))
                cluster.observe(now, name, Facts("1", BLOCK), LoadReport())
        gate = Gateway(
            parse(
                GatewayConfig,
                {"controller": f"127.0.0.1:{control.port}", "listen": "127.0.0.1:0", **(gateway or {})},
            )
        )
        known = asyncio.Event()
        update = gate.cluster.update

        def updated(instances: Any) -> None:
            update(instances)
            if gate.ready:
                known.set()

        gate.cluster.update = updated  # type: ignore[method-assign]
        url = await gate.start()
        stack.push_async_callback(gate.stop)
        context = ssl.create_default_context()
        if ca is not None:
            ca.configure_trust(context)
        connector = aiohttp.TCPConnector(ssl=context, force_close=True)
        http = await stack.enter_async_context(aiohttp.ClientSession(connector=connector))
        await known.wait()
        yield System(control, gate, engines, http, url)


def secured(folder: Path, ca: trustme.CA) -> tuple[dict[str, Any], dict[str, Any], list[Pair]]:
    """Settings of controller and gateway with every credential there is, and the three pairs of certificates."""
    ca_file = trust(folder, ca)
    server, client, front = (issue(ca, folder, name) for name in ("controller", "gateway", "front"))
    return (
        {
            "tls": {**server._asdict(), "client_ca_file": ca_file},
            "auth": {
                "admin_token_file": write(folder / "admin", "admin-token\n"),
                "gateway_token_file": write(folder / "accepted", "gateway-token\n"),
            },
        },
        {
            "controller_tls": {"ca_file": ca_file, **client._asdict()},
            "controller_token_file": write(folder / "shown", "gateway-token\n"),
            "tls": front._asdict(),
            "api_keys_file": write(folder / "keys", "acme:acme-key\nevil:evil-key\nacme:acme-second\n"),
        },
        [server, client, front],
    )


async def test_rotating_certificates_tokens_and_keys_under_load_fails_no_call(tmp_path: Path) -> None:
    old, new = trustme.CA(), trustme.CA()
    for_controller, for_gateway, pairs = secured(tmp_path, old)
    async with system(for_controller, for_gateway, old) as s:
        new.configure_trust(s.http.connector._ssl)  # type: ignore[union-attr]
        answers: list[int] = []
        heard = asyncio.Condition()
        keys = ["acme-key"]

        async def load() -> None:
            while True:
                status, _, _ = await s.chat(key=keys[-1], X_Session_ID="s")
                async with heard:
                    answers.append(status)
                    heard.notify_all()

        async def some_calls() -> None:
            async with heard:
                goal = len(answers) + 4
                await heard.wait_for(lambda: len(answers) >= goal)

        async with asyncio.TaskGroup() as tasks:
            workers = [tasks.create_task(load()) for _ in range(2)]
            await some_calls()
            trust(tmp_path, old, new)
            for pair in pairs:
                leaf = new.issue_cert("127.0.0.1")
                write(pair.cert_file, chain(leaf))
                await some_calls()
                write(pair.key_file, leaf.private_key_pem.bytes())
                await some_calls()
            trust(tmp_path, new)
            await some_calls()
            write(tmp_path / "accepted", "next-token\ngateway-token\n")
            write(tmp_path / "shown", "next-token\n")
            await some_calls()
            write(tmp_path / "accepted", "next-token\n")
            write(tmp_path / "keys", "acme:acme-key\nacme:fresh-key\n")
            keys.append("fresh-key")
            await some_calls()
            for worker in workers:
                worker.cancel()
        assert set(answers) == {200}
        sample = s.gateway.metrics.registry.get_sample_value
        # Nobody placed a call without the controller, which would hide a failure to reach it.
        assert sample("pd_shadow_gateway_controller_fallbacks_total") == 0
        assert sample("pd_shadow_gateway_stale_credentials_total", {"field": "controller_tls.key_file"}) == 1
        server, client, front = pairs
        assert await asyncio.to_thread(shown, s.controller.port, client) == der(server.cert_file)
        assert await asyncio.to_thread(shown, int(s.url.rsplit(":", 1)[1])) == der(front.cert_file)


@pytest.mark.parametrize("field", ["controller_tls.ca_file", "controller_token_file", "tls.key_file", "api_keys_file"])
def test_a_gateway_without_its_files_does_not_start(tmp_path: Path, field: str) -> None:
    _, given, _ = secured(tmp_path, trustme.CA())
    path = given
    for part in field.split("."):
        path = path[part]
    Path(str(path)).unlink()
    with pytest.raises(ConfigError, match=f"^{field}: .*No such file or directory"):
        Gateway(parse(GatewayConfig, given))


@pytest.mark.parametrize("line", ["no colon", ":key", "acme:", "acme:two words", f"{'t' * 129}:key", "evil:acme-key"])
def test_malformed_key_files_are_told_by_line_and_without_the_key(tmp_path: Path, line: str) -> None:
    path = write(tmp_path / "keys", f"# keys\nacme:acme-key\n{line}\n")
    with pytest.raises(ConfigError, match=r"^api_keys_file: .*keys: line 3: ") as caught:
        Gateway(parse(GatewayConfig, {"api_keys_file": path}))
    assert "acme-key" not in str(caught.value)
    assert "two words" not in str(caught.value)


async def test_a_key_names_the_tenant_and_no_header_changes_it(tmp_path: Path) -> None:
    keys = write(tmp_path / "keys", "acme:acme-key\nevil:evil-key\n")
    async with system(gateway={"api_keys_file": keys}) as s:
        for key, code in (("", "Missing"), ("acme-kez", "Incorrect"), ("acme:acme-key", "Incorrect")):
            status, payload, headers = await s.chat(key=key)
            assert (status, payload["error"]["code"], headers["WWW-Authenticate"]) == (401, "invalid_api_key", "Bearer")
            assert payload["error"]["message"].startswith(code)
            assert "acme" not in payload["error"]["message"]
        assert (await s.chat(key="evil-key", X_Tenant_ID="acme"))[1]["error"]["code"] == "wrong_tenant"
        assert not s.engines["a-p"].seen
        assert (await s.chat(key="acme-key", X_Tenant_ID="acme", X_Session_ID="s"))[0] == 200
        assert [session.key for session in s.controller.plane.cluster.sessions] == [SessionKey("acme", "s")]
        async with s.http.get(f"{s.url}/v1/models") as response:
            assert response.status == 401
        for path in ("/health", "/ready", "/metrics"):
            async with s.http.get(s.url + path) as response:
                assert response.status == 200


async def test_tenants_with_the_same_session_id_share_no_binding_warmth_or_salt(tmp_path: Path) -> None:
    keys = write(tmp_path / "keys", "acme:acme-key\nevil:evil-key\n")
    acme, evil = SessionKey("acme", "s"), SessionKey("evil", "s")
    async with system(gateway={"api_keys_file": keys}) as s:
        prompt = "x" * 40
        cluster = s.controller.plane.cluster

        ended = asyncio.Queue[str]()
        end_call = cluster.end_call

        def end(now: float, call_id: str, *more: Any) -> Any:
            ended.put_nowait(call_id)
            return end_call(now, call_id, *more)

        cluster.end_call = end  # type: ignore[method-assign]

        def prefilled(key: SessionKey) -> int:
            return {model.model: model.prefill_tokens for model in cluster.warmth(key)[1]}["a"]

        await s.chat(prompt, key="acme-key", X_Session_ID="s")
        await ended.get()
        theirs = s.engines["a-d"].calls()[-1].body["cache_salt"]
        assert prefilled(acme) > 0
        with pytest.raises(RejectedError):
            cluster.warmth(evil)
        # Another tenant with the same session id and prompt, who even knows the salt.
        body = {"model": "a", "messages": [{"role": "user", "content": prompt}], "cache_salt": theirs}
        headers = {"Authorization": "Bearer evil-key", "X-Session-ID": "s"}
        async with s.http.post(s.url + CHAT, json=body, headers=headers) as response:
            assert response.status == 200
        await ended.get()
        salts = [[seen.body["cache_salt"] for seen in s.engines[name].calls()] for name in ("a-p", "a-d")]
        assert salts[0] == salts[1]
        assert salts[0][0] == theirs != salts[0][1]
        # What one tenant's context loses, the other's keeps.
        before = prefilled(evil)
        assert before > 0
        with s.controller.plane.turn() as (_, now):
            cluster.shrunk(now, InstanceRef("a-p", "1"), acme, 0)
        assert (prefilled(acme), prefilled(evil)) == (0, before)


async def test_no_prompt_token_id_or_secret_reaches_logs_events_or_metrics(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    marker, said = "M4RK3R-prompt", "M4RK3R-answer"
    for_controller, for_gateway, _ = secured(tmp_path, ca := trustme.CA())
    secrets = ["admin-token", "gateway-token", "acme-key", "evil-key", "M4RK3R"]
    # The ids of the marker's tokens in a row, as any list would show them.
    secrets += [", ".join(map(str, encode("M4RK"))), ",".join(map(str, encode("M4RK")))]
    caplog.set_level(logging.DEBUG)
    with structlog.testing.capture_logs() as lines:
        async with system(for_controller, for_gateway, ca) as s:
            for engine in s.engines.values():
                engine.words = [said, said]
            assert (await s.chat(marker, key="acme-key", X_Session_ID="s"))[0] == 200
            # Engines quote what they refuse, and fail in their own words.
            for status in (400, 500):
                for engine in s.engines.values():
                    engine.script = lambda seen, status=status: (status, {"error": {"message": f"not {seen.body}"}})

                async def tokenize(body: dict[str, Any], status: int = status) -> tuple[int, dict[str, Any]]:
                    return status, {"error": {"message": f"not {body}"}}

                for engine in s.engines.values():
                    engine.tokenize = tokenize
                assert (await s.chat(marker, key="acme-key", X_Session_ID="s"))[0] in (400, 502)
            for bad in ("wrong-key-M4RK3R", ""):
                assert (await s.chat(marker, key=bad))[0] == 401
            # Content that runs over its length is taken for the next request, and is none.
            reader, writer = await asyncio.open_connection(
                "127.0.0.1", int(s.url.rsplit(":", 1)[1]), ssl=ca_context(ca)
            )
            writer.write(f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{{}}{marker}\r\n\r\n".encode())
            await reader.read()
            writer.close()
            async with s.http.get(f"http://127.0.0.1:{s.controller.metrics_port}/metrics") as response:
                metrics = await response.text()
            metrics += s.gateway.metrics.text().decode()
            events = [repr(event) for event in s.controller.plane.cluster.events()]
    assert any(line["event"] == "prefill_failed" for line in lines)
    assert "pd_shadow_controller_calls" in metrics
    for text in (*map(repr, lines), *caplog.messages, *events, metrics):
        for secret in secrets:
            assert secret not in text


def ca_context(ca: trustme.CA) -> ssl.SSLContext:
    context = ssl.create_default_context()
    ca.configure_trust(context)
    return context


async def test_an_address_comes_from_registration_never_from_a_caller(tmp_path: Path) -> None:
    async with system() as s:
        body = {
            "model": "a",
            "messages": [{"role": "user", "content": "hi"}],
            "kv_transfer_params": {"do_remote_prefill": True, "remote_engine_id": "x", "remote_host": "6.6.6.6"},
            "ec_transfer_params": {"remote_host": "6.6.6.6"},
            "vllm_xargs": {"kv_transfer_params": "6.6.6.6", "pd_shadow_session": "acme/s"},
        }
        headers = {"X-Prefiller-Host-Port": "6.6.6.6:1", "X-Forwarded-Host": "6.6.6.6", "Host": "6.6.6.6"}
        async with s.http.post(s.url + CHAT, json=body, headers=headers) as response:
            assert response.status == 200
        sent = [seen for engine in s.engines.values() for seen in engine.calls()]
        assert len(sent) == 2
        for seen in sent:
            assert "6.6.6.6" not in repr(seen.body) + repr(dict(seen.headers))
            assert "acme" not in repr(seen.body)

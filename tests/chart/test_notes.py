"""The commands that NOTES.txt prints, carried out against processes with the rendered configuration."""

import asyncio
import base64
import contextlib
import os
import re
import sys
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import NamedTuple

import pytest
import trustme
import yaml

from controller.config import ControllerConfig
from controller.server.app import Controller
from pd_shadow.common.config import parse
from pd_shadow.engine.emulated.config import EmulatedEngines
from pd_shadow.engine.emulated.serve import running
from pd_shadow.gateway.app import Gateway
from pd_shadow.gateway.config import GatewayConfig
from tests.chart.support import ROOT, Manifest, chart, of_kind, pod_specs
from tests.credentials import chain

RELEASE, NAMESPACE = "pd-shadow", "agents"
KEY = "key-of-the-agents-0123456789"
BASE: Manifest = {
    "controller": {"replicas": 1},
    "models": {"small": {"model": "L3.1-8B", "emulated": {"enabled": True, "speed": 20}, "colocated": {}}},
}
TLS = {"enabled": True, "controllerSecret": "controller", "clientSecret": "client", "gatewaySecret": "gateway"}
TOKENS = {
    **{f"{scope}Token": {"secretName": "tokens", "key": f"{scope}.txt"} for scope in ("admin", "gateway", "instance")},
    "apiKeys": {"secretName": "keys"},
}
Secrets = Mapping[str, Mapping[str, bytes]]


def secrets() -> Secrets:
    """What the values name, as an operator would have made it; two tokens in each file, as while one is replaced."""
    ca = trustme.CA()

    def pair(name: str) -> dict[str, bytes]:
        leaf = ca.issue_cert(f"{RELEASE}-{name}.{NAMESPACE}.svc.cluster.local")
        return {"ca.crt": ca.cert_pem.bytes(), "tls.crt": chain(leaf), "tls.key": leaf.private_key_pem.bytes()}

    tokens = {
        f"{scope}.txt": f"# of {scope}\nnew-{scope}-token-0123456789\nold-{scope}-token-0123456789\n".encode()
        for scope in ("admin", "gateway", "instance")
    }
    keys = {"api-keys": f"team:{KEY}\n".encode()}
    return {**{name: pair(name) for name in ("controller", "client", "gateway")}, "tokens": tokens, "keys": keys}


class Cluster(NamedTuple):
    """Processes that run on what the pods of a release have."""

    controller: str
    """HOST:PORT."""
    gateway: str
    """HOST:PORT."""


def mounted(manifests: list[Manifest], workload: str, secrets: Secrets, folder: Path) -> Manifest:
    """The workload's document, with the volumes of its container below `folder` in place of /."""
    spec = pod_specs(manifests)[workload]
    volumes = {volume["name"]: volume for volume in spec["volumes"]}
    documents: list[Manifest] = []
    for mount in spec["containers"][0]["volumeMounts"]:
        volume = volumes[mount["name"]]
        place = folder / workload / mount["mountPath"].lstrip("/")
        place.mkdir(parents=True)
        if "secret" in volume:
            for file, content in secrets[volume["secret"]["secretName"]].items():
                (place / file).write_bytes(content)
        for source in volume.get("projected", {}).get("sources", ()):
            for item in source["secret"]["items"]:
                (place / item["path"]).write_bytes(secrets[source["secret"]["name"]][item["key"]])
        if "configMap" in volume:
            (text,) = of_kind(manifests, "ConfigMap")[volume["configMap"]["name"]]["data"].values()
            documents.append(yaml.safe_load(text.replace("/etc/pd-shadow", str(folder / workload / "etc/pd-shadow"))))
    (document,) = documents
    return document


@contextlib.asynccontextmanager
async def installed(manifests: list[Manifest], secrets: Secrets, folder: Path) -> AsyncIterator[Cluster]:
    """Controller, gateway and one emulated engine; only addresses differ from the rendered documents."""
    documents = {
        part: mounted(manifests, f"{RELEASE}-{part}", secrets, folder)
        for part in ("controller", "gateway", "small-colocated")
    }
    local = {"listen": "127.0.0.1:0", "metrics_listen": None, "log_level": "error"}
    polling = {"poll_interval_seconds": 0.1}
    config = parse(ControllerConfig, {**documents["controller"], **local, "discovery": polling})
    async with Controller(config).running() as controller, contextlib.AsyncExitStack() as stack:
        address = f"127.0.0.1:{controller.port}"
        engines = parse(EmulatedEngines, {**documents["small-colocated"], "controller": address})
        one = {"name": "small-0", "host": "127.0.0.1", "port": 0}
        await stack.enter_async_context(running(engines.with_only_engine(one)))
        gateway = Gateway(
            parse(GatewayConfig, {**documents["gateway"], "controller": address, "listen": "127.0.0.1:0"})
        )
        url = await gateway.start()
        stack.push_async_callback(gateway.stop)
        while not (known(controller, "small-0") and gateway.cluster.ready_models()):  # noqa: ASYNC110 - the state of another component
            await asyncio.sleep(0.02)
        yield Cluster(address, url.partition("://")[2])


def known(controller: Controller, instance: str) -> bool:
    with controller.plane.turn() as (cluster, _):
        return cluster.registry.named(instance) is not None


def commands(notes: str) -> list[str]:
    """What is to be typed in steps 2 and 3, less port-forwards; the live view with an end."""
    steps = re.search(r"^2\. .*?(?=^4\. )", notes, re.MULTILINE | re.DOTALL)
    assert steps is not None
    typed = [line.strip() for line in steps[0].splitlines()]
    typed = [line for line in typed if line.split(" ")[0] in ("kubectl", "pd-shadow", "curl", "umask")]
    return [re.sub(r" top$", " top --once", line) for line in typed if " port-forward " not in line]


def tools(folder: Path) -> Path:
    """`pd-shadow`, and a `kubectl` that reads secrets from files as they are in Secrets, in base64."""
    folder.mkdir()
    scripts = {
        "pd-shadow": f'exec {sys.executable} -c "from pd_shadow.cli.main import main; main()" "$@"',
        "kubectl": (
            f'test "$1 $2 $3 $4 $6" = "-n {NAMESPACE} get secret -o" || exit 1\n'
            "key=${7#jsonpath=\\{.data.}; key=${key%\\}}\n"
            'base64 -w0 "$SECRETS/$5/$(printf %s "$key" | tr -d "\\\\\\\\")"'
        ),
    }
    for name, text in scripts.items():
        (folder / name).write_text(f"#!/bin/sh\n{text}\n")
        (folder / name).chmod(0o755)
    return folder


@pytest.mark.timeout(90)
@pytest.mark.parametrize(
    "values",
    [
        {},
        {"auth": TOKENS},
        {"tls": {**TLS, "mutual": False, "gatewaySecret": ""}},
        {"tls": TLS, "auth": TOKENS},
    ],
    ids=["plain", "tokens", "tls", "mutual-tls-and-tokens"],
)
async def test_a_newcomer_lists_models_and_instances_with_what_notes_say(values: Manifest, tmp_path: Path) -> None:
    files = chart().render({**BASE, **values}, name=RELEASE, namespace=NAMESPACE)
    manifests = [m for path, text in files.items() if path.endswith(".yaml") for m in yaml.safe_load_all(text) if m]
    stored = secrets()
    for name, content in stored.items():
        (tmp_path / "secrets" / name).mkdir(parents=True)
        for file, data in content.items():
            (tmp_path / "secrets" / name / file).write_bytes(data)
    async with installed(manifests, stored, tmp_path) as cluster:
        script = "\n".join(commands(files["pd-shadow/templates/NOTES.txt"]))
        script = script.replace("127.0.0.1:7070", cluster.controller).replace("127.0.0.1:8000", cluster.gateway)
        shell = await asyncio.create_subprocess_exec(
            "bash", "-euo", "pipefail", "-c", script,
            cwd=tmp_path, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
            env={
                "PATH": f"{tools(tmp_path / 'bin')}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT), "KEY": KEY,
                "SECRETS": str(tmp_path / "secrets"), "PD_SHADOW_CONTEXTS": str(tmp_path / "contexts.yaml"),
            },
        )  # fmt: skip
        said = (await shell.communicate())[0].decode()
    assert shell.returncode == 0, f"{script}\n{said}"
    models, *rest = said.partition("INSTANCE")
    assert '"id":"small"' in models.replace(" ", ""), said
    assert "small-0" in "".join(rest), said
    for secret in (KEY, base64.b64encode(stored["tokens"]["admin.txt"]).decode(), "admin-token"):
        assert secret not in said

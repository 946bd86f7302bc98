"""The configuration in ConfigMaps is what the processes read: it goes through the very models they use."""

import json
from typing import Any

import click
import pytest

from controller.config import ControllerConfig
from pd_shadow.cli.main import main
from pd_shadow.common.config import Config, parse
from pd_shadow.engine.emulated.config import EmulatedEngines
from pd_shadow.engine.vllm.gpu_command import GpuEngineCommand
from pd_shadow.gateway.config import GatewayConfig
from tests.chart.support import ALL, document, example, of_kind, pod_specs, render, rendered

MODELS: dict[str, type[Config]] = {
    "controller.yaml": ControllerConfig,
    "gateway.yaml": GatewayConfig,
    "engine.yaml": GpuEngineCommand,
}


@pytest.mark.parametrize("name", ALL)
def test_every_document_fits_the_model_of_its_process(name: str) -> None:
    found = [doc for manifest in rendered(name) if (doc := document(manifest)) is not None]
    assert {"controller.yaml", "gateway.yaml"} <= {file for file, _ in found}
    for file, content in found:
        model = EmulatedEngines if "engines" in content else MODELS[file]
        parsed = parse(model, content, source=file)
        if isinstance(parsed, EmulatedEngines):
            assert parsed.with_only_engine({"name": "engine-0", "host": "10.0.0.7"}).attach is not None
        if isinstance(parsed, GpuEngineCommand):
            assert parsed.model_copy(update={"name": "engine-0", "address": "10.0.0.7"}).argv()


@pytest.mark.parametrize("name", ALL)
def test_every_container_starts_with_options_that_exist(name: str) -> None:
    for workload, spec in pod_specs(rendered(name)).items():
        for container in spec["containers"]:
            assert container["command"] == ["pd-shadow"]
            command, args, context = main, list(container["args"]), click.Context(main)
            while isinstance(command, click.Group):
                found = command.get_command(context, args.pop(0))
                assert found is not None, workload
                command = found
            # Files are in the container only.
            accepted = {option for parameter in command.params for option in parameter.opts}
            assert {arg.split("=")[0] for arg in args if arg.startswith("--")} <= accepted


def test_settings_of_models_and_pools_are_laid_over_each_other() -> None:
    values = {
        "engines": {"engine": {"gpu_memory_utilization": 0.8, "plugin": {"beta": 0.4}}},
        "models": {
            "small": {
                "model": "org/model",
                "engine": {"max_model_len": 32768, "plugin": {"cap_share": 0.2}},
                "prefill": {"gpus": 4, "engine": {"max_model_len": 65536}},
                "decode": {"gpus": 2, "engine": {"tensor_parallel_size": 1}},
            }
        },
    }
    configs = of_kind(render(values), "ConfigMap")
    prefill = document(configs["pd-shadow-small-prefill"])
    decode = document(configs["pd-shadow-small-decode"])
    assert prefill is not None
    assert decode is not None
    assert prefill[1] == {
        "model": "org/model",
        "served_name": "small",
        "role": "prefill",
        "port": 8000,
        "drain_seconds": 120,
        "controller": "pd-shadow-controller.agents.svc.cluster.local:7070",
        "gpu_memory_utilization": 0.8,
        "max_model_len": 65536,
        "tensor_parallel_size": 4,
        "plugin": {"beta": 0.4, "cap_share": 0.2, "metrics_listen": "0.0.0.0:9464"},
    }
    assert decode[1]["max_model_len"] == 32768
    assert decode[1]["tensor_parallel_size"] == 1


def test_a_stock_engine_has_no_plugin_and_no_controller() -> None:
    values = {
        "discovery": {"kubernetes": {"enabled": True}},
        "models": {"small": {"model": "m", "prefill": {"plugin": False}, "decode": {}}},
    }
    found = document(of_kind(render(values), "ConfigMap")["pd-shadow-small-prefill"])
    assert found is not None
    assert found[1]["plugin"] is None
    assert "controller" not in found[1]
    argv = parse(GpuEngineCommand, {**found[1], "address": "10.0.0.7"}).argv()
    assert "--scheduler-cls" not in argv


def test_the_plugin_attaches_under_the_pods_name_and_address() -> None:
    found = document(of_kind(rendered("minimal"), "ConfigMap")["pd-shadow-small-decode"])
    assert found is not None
    argv = parse(GpuEngineCommand, {**found[1], "name": "pd-shadow-small-decode-0", "address": "fd00::7"}).argv()
    additional = json.loads(argv[argv.index("--additional-config") + 1])
    assert additional["pd_shadow"]["reporter"] == {
        "controller": "pd-shadow-controller.agents.svc.cluster.local:7070",
        "name": "pd-shadow-small-decode-0",
        "url": "http://[fd00::7]:8000",
    }


def test_an_attached_engine_has_the_token_and_the_certificates_of_its_pod() -> None:
    found = document(of_kind(rendered("secured"), "ConfigMap")["pd-shadow-small-decode"])
    assert found is not None
    argv = parse(GpuEngineCommand, {**found[1], "name": "d-0", "address": "10.0.0.7"}).argv()
    reporter = json.loads(argv[argv.index("--additional-config") + 1])["pd_shadow"]["reporter"]
    assert reporter["controller_token_file"] == "/etc/pd-shadow/tokens/instance"
    assert reporter["controller_tls"]["ca_file"] == "/etc/pd-shadow/client-tls/ca.crt"
    assert reporter["controller_tls"]["server_name"] == reporter["controller"].rsplit(":", 1)[0]


@pytest.mark.parametrize("mutual", [True, False])
def test_emulated_engines_attach_as_those_of_vllm_do(mutual: bool) -> None:
    def access(emulated: bool) -> dict[str, Any]:
        values = {
            **example("secured"),
            "models": {"small": {"model": "L3.1-8B", "emulated": {"enabled": emulated}, "prefill": {}, "decode": {}}},
        }
        values["tls"]["mutual"] = mutual
        found = document(of_kind(render(values), "ConfigMap")["pd-shadow-small-decode"])
        assert found is not None
        return {key: value for key, value in found[1].items() if key.startswith("controller")}

    assert access(emulated=True) == access(emulated=False)
    assert ("cert_file" in access(emulated=True)["controller_tls"]) == mutual


def test_emulated_engines_take_over_what_they_know_of_the_settings_of_engines() -> None:
    values = {
        "engines": {"engine": {"gpu_memory_utilization": 0.8, "plugin": {"beta": 0.4}}},
        "discovery": {"kubernetes": {"enabled": True}},
        "models": {
            "small": {
                "model": "L3.1-8B",
                "emulated": {"enabled": True, "speed": 4},
                "prefill": {"engine": {"max_model_len": 4096}},
                "decode": {"plugin": False},
            }
        },
    }
    configs = of_kind(render(values), "ConfigMap")
    prefill, decode = (document(configs[f"pd-shadow-small-{role}"]) for role in ("prefill", "decode"))
    assert prefill is not None
    assert decode is not None
    assert prefill[1]["engines"] == [
        {
            "name": "pd-shadow-small-prefill", "model": "L3.1-8B", "served_model_name": "small", "role": "prefill",
            "host": "0.0.0.0", "port": 8000, "speed": 4, "max_model_len": 4096, "plugin": {"beta": 0.4},
        }
    ]  # fmt: skip
    assert decode[1]["engines"][0]["plugin"] is None
    assert "controller" not in decode[1]


def test_a_config_with_nothing_but_comments_is_an_empty_one() -> None:
    configs = of_kind(render({"controller": {"config": None}, "gateway": {"config": None}}), "ConfigMap")
    for name in ("controller", "gateway"):
        assert configs[f"pd-shadow-{name}"] == of_kind(render({}), "ConfigMap")[f"pd-shadow-{name}"]


def test_large_numbers_stay_numbers() -> None:
    values = {"controller": {"config": {"limits": {"max_sessions": 100_000_000}}}}
    found = document(of_kind(render(values), "ConfigMap")["pd-shadow-controller"])
    assert found is not None
    assert found[1]["limits"] == {"max_sessions": 100_000_000}


def test_secrets_are_mounted_where_the_documents_look_for_them() -> None:
    manifests = rendered("secured")
    for manifest in manifests:
        found = document(manifest)
        if found is None:
            continue
        (container,) = pod_specs(manifests)[manifest["metadata"]["name"]]["containers"]
        mounts = {mount["mountPath"] for mount in container["volumeMounts"]}
        for path in files_in(found[1]):
            assert path.rsplit("/", 1)[0] in mounts, (found[0], path)


def files_in(content: Any) -> list[str]:
    if isinstance(content, dict):
        return [path for value in content.values() for path in files_in(value)]
    return [content] if isinstance(content, str) and content.startswith("/etc/pd-shadow/") else []

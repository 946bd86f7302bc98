"""The chart as Helm renders it, and the Kubernetes schemas to hold it against."""

import functools
import itertools
import json
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jsonschema
import yaml
from helm_python import Chart
from kubernetes_validate.utils import schema_contents
from pydantic import BaseModel
from referencing import Registry, Resource

from pd_shadow.chart.values import ChartValues

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "helm" / "pd-shadow"
EXAMPLES = sorted((CHART / "examples").glob("*.yaml"))
# The oldest that Chart.yaml allows, one in between, the newest known.
KUBERNETES = ("1.30.0", "1.34.0", "1.37.0")
# Custom resources, which the Kubernetes schemas do not have.
CUSTOM = {"ServiceMonitor", "PodMonitor", "PrometheusRule", "Certificate"}

Manifest = dict[str, Any]


@functools.cache
def chart() -> Chart:
    return Chart.load(str(CHART))


def render(values: Mapping[str, Any], name: str = "pd-shadow", namespace: str = "agents") -> list[Manifest]:
    """All objects, hooks included; raises HelmError where Helm refuses."""
    files = chart().render(dict(values), name=name, namespace=namespace)
    return [
        manifest
        for path, text in files.items()
        if path.endswith(".yaml")
        for manifest in yaml.load_all(text, yaml.CSafeLoader)
        if manifest is not None
    ]


def example(name: str) -> Manifest:
    values: Manifest = yaml.safe_load((CHART / "examples" / f"{name}.yaml").read_text())
    return values


def of_kind(manifests: list[Manifest], kind: str) -> dict[str, Manifest]:
    return {manifest["metadata"]["name"]: manifest for manifest in manifests if manifest["kind"] == kind}


def pod_specs(manifests: list[Manifest]) -> dict[str, Manifest]:
    """The pod specs of all workloads and of the test pod, by the object's name."""
    specs = {m["metadata"]["name"]: m["spec"]["template"]["spec"] for m in manifests if "template" in m.get("spec", {})}
    return {**specs, **{name: pod["spec"] for name, pod in of_kind(manifests, "Pod").items()}}


def document(manifest: Manifest) -> tuple[str, Manifest] | None:
    """(file name, content) of the configuration document in a ConfigMap; None for other objects."""
    if manifest["kind"] != "ConfigMap":
        return None
    for name, text in manifest["data"].items():
        if name.endswith(".yaml"):
            return name, yaml.load(text, yaml.CSafeLoader)
    return None


@functools.cache
def _validator(kind: str, api_version: str, version: str) -> jsonschema.Draft202012Validator:
    group = api_version.split("/")[0].split(".")[0]
    suffix = f"{group}-{api_version.split('/')[1]}" if "/" in api_version else api_version
    folder = f"kubernetes-json-schema/v{version}-local-strict"
    schema = schema_contents(f"{folder}/{kind.lower()}-{suffix}.json", version)
    registry: Registry[Any] = Registry().with_resources([("", Resource.from_contents(schema))])
    registry = _definitions(folder, version) @ registry
    return jsonschema.Draft202012Validator(schema, registry=registry)


@functools.cache
def _definitions(folder: str, version: str) -> "Resource[Any]":
    return Resource.from_contents(schema_contents(f"{folder}/_definitions.json", version))


@functools.cache
def _problems(text: str, version: str) -> tuple[str, ...]:
    manifest = json.loads(text)
    validator = _validator(manifest["kind"], manifest["apiVersion"], version)
    return tuple(f"{'.'.join(map(str, e.absolute_path))}: {e.message}" for e in validator.iter_errors(manifest))


def problems(manifest: Manifest) -> list[str]:
    """What the Kubernetes versions say against an object, unknown fields included."""
    if manifest["kind"] in CUSTOM:
        return []
    text = json.dumps(manifest, sort_keys=True)
    where = f"{manifest['kind']} {manifest['metadata']['name']}"
    return [f"{version}: {where}: {problem}" for version in KUBERNETES for problem in _problems(text, version)]


MODEL = {"model": "Qwen/Qwen3-8B"}
ENGINES: Mapping[str, Manifest] = {
    "no-engines": {},
    "prefill-decode": {"models": {"small": {**MODEL, "prefill": {}, "decode": {"replicas": 3, "gpus": 2}}}},
    "two-models": {
        "engines": {"rdma": {"resources": {"rdma/hca": 1}, "networks": "kv/net"}},
        "models": {
            "small": {
                **MODEL,
                "servedName": "org/small",
                "prefill": {"nixlPorts": {"first": 30000, "last": 30099}},
                "decode": {},
            },
            "large": {
                "model": "/models/large",
                "engine": {"host_tier": {"size_gib": 64}, "offline": True, "plugin": {"cap_share": 0.2}},
                "prefill": {
                    "gpus": 8,
                    "sharedMemory": "80Gi",
                    "engine": {"side_channel_port": 5700, "extra_args": ["--enforce-eager"]},
                },
                "decode": {"gpus": 8, "sharedMemory": "64Gi", "modelCache": {"claimName": "models"}},
            },
        },
    },
    "colocated": {"models": {"small": {**MODEL, "colocated": {"modelCache": {"hostPath": "/data/models"}}}}},
    "emulated": {"models": {"small": {"model": "L3.1-8B", "emulated": {"enabled": True}, "prefill": {}, "decode": {}}}},
    "discovered": {"discovery": {"kubernetes": {"enabled": True, "namespaces": ["one", "two"]}}},
    "stock": {
        "discovery": {"kubernetes": {"enabled": True}},
        "models": {"small": {**MODEL, "prefill": {"plugin": False}, "decode": {"plugin": False}}},
    },
}
TLS: Mapping[str, Manifest] = {
    "plain": {},
    "cert-manager": {"tls": {"enabled": True, "certManager": {"enabled": True, "issuerRef": {"name": "ca"}}}},
    "own-secrets": {
        "tls": {"enabled": True, "mutual": False, "controllerSecret": "c", "clientSecret": "k", "gatewaySecret": "g"}
    },
}
ACCESS: Mapping[str, Manifest] = {
    "open": {"networkPolicy": {"enabled": False}, "tests": {"enabled": False}},
    "tokens": {
        "auth": {
            **{f"{scope}Token": {"secretName": "tokens", "key": scope} for scope in ("admin", "gateway", "instance")},
            "apiKeys": {"secretName": "keys"},
        },
        "networkPolicy": {"apiFrom": [{"podSelector": {"matchLabels": {"app": "agent"}}}]},
    },
}
CONTROL: Mapping[str, Manifest] = {
    "one": {
        "controller": {"replicas": 1, "podDisruptionBudget": {"enabled": True}},
        "gateway": {"replicas": 1, "podDisruptionBudget": {"enabled": False}},
    },
    "several": {
        "controller": {
            "replicas": 3,
            "config": {"grace_seconds": 7.5, "limits": {"max_sessions": 1000000}, "shadow": {"top_k": 2}},
            "serviceAccount": {"annotations": {"team": "llm"}},
        },
        "gateway": {
            "autoscaling": {"enabled": True, "targetInFlightCalls": 200},
            "config": {"caps": {"session_tokens": 100000000}, "deadlines": {"shutdown_grace": 90}},
            "extraEnv": [{"name": "A", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}}],
            "topologySpreadConstraints": [
                {"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "ScheduleAnyway"},
                {"maxSkew": 2, "topologyKey": "rack", "whenUnsatisfiable": "DoNotSchedule", "matchLabelKeys": ["x"]},
            ],
            "service": {"type": "LoadBalancer", "annotations": {"lb": "internal"}},
        },
        "metrics": {
            "serviceMonitor": {"enabled": True, "labels": {"release": "prometheus"}},
            "podMonitor": {"enabled": True},
            "prometheusRule": {"enabled": True},
        },
        "grafana": {"dashboard": {"enabled": True}},
        "commonLabels": {"owner": "llm"},
        "commonAnnotations": {"contact": "llm@example.com"},
        "imagePullSecrets": [{"name": "pull"}],
    },
}


def combinations() -> Iterator[tuple[str, Manifest]]:
    """The values matrix: every combination that the chart takes, by name."""
    for choice in itertools.product(ENGINES, TLS, ACCESS, CONTROL):
        engines, tls, access, control = choice
        yield "-".join(choice), {**ENGINES[engines], **TLS[tls], **ACCESS[access], **CONTROL[control]}


MATRIX = dict(combinations())


@functools.cache
def rendered(name: str) -> list[Manifest]:
    """One combination of the matrix, or one example."""
    return render(MATRIX[name] if name in MATRIX else example(name))


ALL = (*MATRIX, *(path.stem for path in EXAMPLES))


def load_values(path: Path) -> Manifest:
    values: Manifest = yaml.load(path.read_text(), yaml.CSafeLoader)
    return values


def keys_of_schema() -> Iterator[tuple[str, ...]]:
    """The path of every key that the chart itself takes; `*` for keys that are the user's.

    Left out: the processes' documents, and parts of Kubernetes objects.
    """
    yield from _keys(ChartValues, ())


def _keys(model: type[BaseModel], path: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    for name, field in model.model_fields.items():
        here = (*path, field.alias or name)
        if name != "global_":
            yield here
        for inner in _models(field.annotation):
            yield from _keys(inner, (*here, "*") if typing.get_origin(field.annotation) is dict else here)


def _models(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        if annotation.__module__ == ChartValues.__module__:
            yield annotation
        return
    for part in typing.get_args(annotation):
        yield from _models(part)


def at_path(values: Any, path: tuple[str, ...]) -> bool:
    """Whether the key stands anywhere that the path leads to."""
    if not path:
        return True
    if not isinstance(values, dict):
        return False
    keys = list(values) if path[0] == "*" else [path[0]]
    return any(key in values and at_path(values[key], path[1:]) for key in keys)

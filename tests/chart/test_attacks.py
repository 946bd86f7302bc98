"""Values as people get them wrong, and releases side by side: a clear refusal, or objects that work."""

import copy
import json
from typing import Any

import pytest
from helm_python import HelmError

from pd_shadow.common.config import Config, parse
from pd_shadow.engine.vllm.gpu_command import GpuEngineCommand
from tests.chart.support import (
    CHART,
    CONTROL,
    TLS,
    Manifest,
    document,
    of_kind,
    pod_specs,
    problems,
    render,
)
from tests.chart.test_documents import MODELS

SMALL: Manifest = {"small": {"model": "m", "prefill": {}, "decode": {}}}
WHOLE: Manifest = {**CONTROL["several"], **TLS["own-secrets"], "models": SMALL, "discovery": {"kubernetes": {}}}
WHOLE["discovery"]["kubernetes"]["enabled"] = True


def laid_over(below: Any, above: Any) -> Any:
    if isinstance(below, dict) and isinstance(above, dict):
        merged = {key: laid_over(below[key], value) if key in below else value for key, value in above.items()}
        return {**below, **merged}
    return above


def without_content(path: list[str]) -> Manifest:
    """Values in which the key stands without content, as when everything below it is a comment."""
    value: Any = None
    for key in reversed(path):
        value = {key: value}
    found: Manifest = value
    return found


def faults(manifests: list[Manifest]) -> list[str]:
    """What the API server or a process would have to say."""
    found = [problem for manifest in manifests for problem in problems(manifest)]
    for manifest in manifests:
        content = document(manifest)
        if content is not None:
            model: type[Config] = MODELS[content[0]]
            assert parse(model, content[1]) is not None
    return found


# Helm deletes a default where the user's values have null.
def test_keys_without_content_have_their_defaults() -> None:
    values: Manifest = {}
    for path in json.loads((CHART / "defaults.json").read_text()):
        values = laid_over(values, without_content(path.split(".")))
    assert render(values) == render({})


SECTIONS = [path for path in json.loads((CHART / "defaults.json").read_text()) if "." not in path]


@pytest.mark.parametrize("key", SECTIONS)
def test_a_section_without_content_is_its_defaults(key: str) -> None:
    assert render({key: None}) == render({})


def test_what_may_be_null_stays_so() -> None:
    context = {"runAsUser": None, "runAsGroup": None, "fsGroup": None}
    spec = pod_specs(render({"gateway": {"podSecurityContext": context, "resources": None}}))["pd-shadow-gateway"]
    assert spec["securityContext"] == {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}
    assert "resources" not in spec["containers"][0]


@pytest.mark.parametrize(
    "values",
    [
        {"controller": {"replicas": 0}},
        {"gateway": {"replicas": -1}},
        {"gateway": {"replicas": "2"}},
        {"gateway": {"service": {"port": -1}}},
        {"gateway": {"service": {"port": "8000"}}},
        {"gateway": {"service": {"port": 65536}}},
        {"gateway": {"podDisruptionBudget": {"maxUnavailable": "half"}}},
        {"gateway": {"podDisruptionBudget": {"maxUnavailable": -1}}},
        {"gateway": {"terminationGracePeriodSeconds": -1}},
        {"gateway": {"podLabels": {"a": 1}}},
        {"image": {"repository": ""}},
        {"image": {"repository": "registry/Upper"}},
        {"image": {"tag": 1.0}},
        {"image": {"tag": "a b"}},
        {"metrics": {"podMonitor": {"interval": "15"}}},
        {"discovery": {"kubernetes": {"enabled": True, "namespaces": ["Team_A"]}}},
        {"nameOverride": "no name"},
        {"fullnameOverride": "UPPER"},
        {"fullnameOverride": "a.b"},
        {"models": {"a" * 23: SMALL["small"]}},
        {"models": {"small": {**SMALL["small"], "decode": {"drainSeconds": -1}}}},
        {"models": {"small": {**SMALL["small"], "decode": {"nixlPorts": {"first": 30000}}}}},
        {"models": {"a": {**SMALL["small"], "servedName": "m"}, "m": {"model": "m", "colocated": {}}}},
        {part: {"serviceAccount": {"name": "one"}} for part in ("controller", "gateway")},
    ],
    ids=str,
)
def test_absurd_values_are_refused(values: Manifest) -> None:
    with pytest.raises(HelmError, match=r"at '/|execution error"):
        render(copy.deepcopy(values))


@pytest.mark.parametrize("name", ["1st", "team.a"])
def test_release_names_that_make_no_service_are_refused_with_the_way_out(name: str) -> None:
    with pytest.raises(HelmError, match="fullnameOverride"):
        render({}, name=name)
    assert faults(render({"fullnameOverride": "shadow"}, name=name)) == []


def identities(manifests: list[Manifest]) -> set[tuple[str, str, str]]:
    return {(m["kind"], m["metadata"]["name"], m["metadata"]["namespace"]) for m in manifests}


@pytest.mark.parametrize(
    ("one", "other"),
    [("alpha", "beta"), (f"{'r' * 45}-one", f"{'r' * 45}-two"), ("r" * 53, "r" * 52)],
)
def test_releases_of_one_namespace_share_no_object_and_no_pod(one: str, other: str) -> None:
    # A long name leaves no room for the names of pools.
    values = WHOLE if len(one) < 20 else {**WHOLE, "models": {}}
    ours, theirs = (render(values, name=name) for name in (one, other))
    assert not identities(ours) & identities(theirs)
    pods = [m["spec"]["template"]["metadata"]["labels"] for m in theirs if "template" in m.get("spec", {})]
    for service in of_kind(ours, "Service").values():
        assert not any(service["spec"]["selector"].items() <= labels.items() for labels in pods)


def test_releases_of_one_name_share_nothing_in_a_namespace_that_both_look_at() -> None:
    values = {"discovery": {"kubernetes": {"enabled": True, "namespaces": ["engines"]}}}
    assert not identities(render(values, namespace="a")) & identities(render(values, namespace="b"))


@pytest.mark.parametrize("key", ["controller", "gateway", "engine", "test", "client", "1", "a-prefill"])
def test_a_models_key_collides_with_no_part_of_the_chart(key: str) -> None:
    manifests = render({**WHOLE, "models": {key: SMALL["small"], "a": SMALL["small"]}})
    assert len(identities(manifests)) == len(manifests)
    assert faults(manifests) == []


def test_the_charts_own_labels_win_over_common_ones() -> None:
    mine = {"app.kubernetes.io/name": "mine", "pdshadow.dev/role": "decode", "owner": "llm"}
    manifests = render({**WHOLE, "commonLabels": mine})
    assert faults(manifests) == []
    for manifest in manifests:
        assert manifest["metadata"]["labels"]["app.kubernetes.io/name"] == "pd-shadow"
        assert manifest["metadata"]["labels"]["owner"] == "llm"
    assert of_kind(manifests, "StatefulSet")["pd-shadow-small-prefill"]["metadata"]["labels"]["pdshadow.dev/role"] == (
        "prefill"
    )


def test_names_that_look_like_numbers_stay_names() -> None:
    number = "123"
    secret = {"secretName": number, "key": number}
    pool = {"modelCache": {"claimName": number}, "huggingFaceToken": secret, "priorityClassName": number}
    account = {"create": False, "name": number}
    manifests = render(
        {
            "controller": {"serviceAccount": account},
            "auth": {f"{scope}Token": secret for scope in ("admin", "gateway", "instance")},
            "tls": {"enabled": True, **{f"{part}Secret": number for part in ("controller", "client", "gateway")}},
            "discovery": {"kubernetes": {"enabled": True, "namespaces": [number]}},
            "image": {"tag": number},
            "models": {number: {"model": number, "servedName": number, "prefill": pool, "decode": pool}},
        },
        name=f"r{number}",
        namespace=number,
    )
    assert faults(manifests) == []
    found = document(of_kind(manifests, "ConfigMap")[f"r{number}-pd-shadow-{number}-prefill"])
    assert found is not None
    assert parse(GpuEngineCommand, found[1]).served_name == number

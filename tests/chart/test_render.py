"""What the real Helm engine makes of the chart, over a matrix of values and all examples."""

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import helm_python
import pytest
from helm_python import HelmError

from controller.discovery.rbac import ELECTION_RULES, RULES
from tests.chart.support import (
    ALL,
    CHART,
    EXAMPLES,
    MATRIX,
    Manifest,
    chart,
    example,
    of_kind,
    pod_specs,
    problems,
    render,
    rendered,
)

DIGEST, OTHER_DIGEST = (f"sha256:{digit * 64}" for digit in "ab")


def test_the_matrix_is_large_enough() -> None:
    assert len(MATRIX) >= 60


@pytest.mark.parametrize("name", ALL)
def test_every_object_fits_the_schemas_of_three_kubernetes_versions(name: str) -> None:
    manifests = rendered(name)
    assert [problem for manifest in manifests for problem in problems(manifest)] == []
    keys = [(m["kind"], m["metadata"]["name"], m["metadata"].get("namespace")) for m in manifests]
    assert len(keys) == len(set(keys)), "two objects of one name"


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_examples_pass_helm_lint_without_a_word(path: Path) -> None:
    report = helm_python.lint(str(CHART), example(path.stem), strict=True, namespace="agents")
    assert report["messages"] == []
    assert report["errors"] == []


def test_defaults_pass_helm_lint_without_a_word() -> None:
    report = helm_python.lint(str(CHART), {}, strict=True)
    assert (report["messages"], report["errors"]) == ([], [])


def test_every_container_is_locked_down() -> None:
    for name in ALL:
        for workload, spec in pod_specs(rendered(name)).items():
            pod = spec["securityContext"]
            assert pod["runAsNonRoot"], (name, workload)
            assert pod["seccompProfile"] == {"type": "RuntimeDefault"}
            for container in spec["containers"]:
                security = container["securityContext"]
                assert security["readOnlyRootFilesystem"], (name, workload)
                assert security["allowPrivilegeEscalation"] is False
                assert security["capabilities"]["drop"] == ["ALL"]
                assert set(security["capabilities"].get("add", ())) <= {"IPC_LOCK"}
                assert "cpu" not in container.get("resources", {}).get("limits", {})


def test_only_a_controller_that_calls_the_api_server_has_a_token() -> None:
    for name in ALL:
        manifests = rendered(name)
        with_token = {w for w, spec in pod_specs(manifests).items() if spec["automountServiceAccountToken"]}
        assert with_token == ({"pd-shadow-controller"} if of_kind(manifests, "Role") else set()), name
        for account in of_kind(manifests, "ServiceAccount").values():
            assert account["automountServiceAccountToken"] is False


def granted(manifests: list[Manifest]) -> set[tuple[str, str, tuple[str, ...]]]:
    verbs: dict[tuple[str, str], set[str]] = {}
    for role in of_kind(manifests, "Role").values():
        for rule in role["rules"]:
            for group in rule["apiGroups"]:
                for resource in rule["resources"]:
                    verbs.setdefault((group, resource), set()).update(rule["verbs"])
    return {(group, resource, tuple(sorted(names))) for (group, resource), names in verbs.items()}


def test_rights_are_those_the_code_uses_and_no_more() -> None:
    manifests = render({"discovery": {"kubernetes": {"enabled": True, "namespaces": ["one", "two"]}}})
    assert granted(manifests) == {(rule.api_group, rule.resource, tuple(sorted(rule.verbs))) for rule in RULES}
    assert not of_kind(manifests, "ClusterRole")
    namespaces = {m["metadata"]["namespace"] for m in manifests if m["kind"] == "Role"}
    assert namespaces == {"agents", "one", "two"}
    bound = [m for m in manifests if m["kind"] == "RoleBinding"]
    assert {(s["name"], s["namespace"]) for b in bound for s in b["subjects"]} == {("pd-shadow-controller", "agents")}


def test_what_is_off_has_no_rights() -> None:
    assert granted(render({"controller": {"replicas": 1}})) == set()
    assert granted(render({})) == {(r.api_group, r.resource, tuple(sorted(r.verbs))) for r in ELECTION_RULES}
    assert granted(render({"controller": {"rbac": {"create": False}}})) == set()


def test_grace_periods_are_above_the_drain_time() -> None:
    values = {
        "controller": {"config": {"grace_seconds": 40}},
        "gateway": {"config": {"deadlines": {"shutdown_grace": 120.5}}},
        "models": {"small": {"model": "m", "prefill": {"drainSeconds": 600}, "decode": {}}},
    }
    specs = pod_specs(render(values))
    grace = {name: spec.get("terminationGracePeriodSeconds") for name, spec in specs.items()}
    assert grace["pd-shadow-controller"] > 40
    assert grace["pd-shadow-gateway"] > 120.5 + 5
    assert grace["pd-shadow-small-prefill"] > 600 + 5


def asked(probe: Manifest) -> Manifest:
    """What a probe asks, without how often."""
    return {kind: probe[kind] for kind in ("grpc", "httpGet", "tcpSocket", "exec") if kind in probe}


@pytest.mark.parametrize("name", ALL)
def test_probes_ask_different_things_and_never_for_engines(name: str) -> None:
    for workload, spec in pod_specs(rendered(name)).items():
        for container in spec["containers"]:
            if spec.get("restartPolicy") == "Never":
                continue
            live, ready = asked(container["livenessProbe"]), asked(container["readinessProbe"])
            assert live != ready, workload
            # The gateway's /ready waits for engines.
            assert "/ready" not in str(ready)
            assert asked(container["startupProbe"]) == live


def test_start_up_waits_as_long_as_weights_take() -> None:
    specs = pod_specs(render({"models": {"small": {"model": "m", "colocated": {"startupSeconds": 7200}}}}))
    probe = specs["pd-shadow-small-colocated"]["containers"][0]["startupProbe"]
    assert probe["periodSeconds"] * probe["failureThreshold"] >= 7200


def test_tls_turns_kubelet_probes_into_commands() -> None:
    (container,) = pod_specs(rendered("secured"))["pd-shadow-controller"]["containers"]
    assert container["livenessProbe"]["exec"]["command"][:3] == ["pd-shadow", "health", "127.0.0.1:7070"]
    assert "--service=readiness" in container["readinessProbe"]["exec"]["command"]


def selects(selector: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    return selector.get("matchLabels", {}).items() <= labels.items()


def pods(manifests: list[Manifest]) -> dict[str, Manifest]:
    return {
        m["metadata"]["name"]: m["spec"]["template"]["metadata"] for m in manifests if "template" in m.get("spec", {})
    }


@pytest.mark.parametrize("name", ALL)
def test_selectors_find_the_pods_they_are_for(name: str) -> None:
    manifests = rendered(name)
    found = pods(manifests)
    for manifest in manifests:
        if manifest["kind"] == "Service":
            assert any(manifest["spec"]["selector"].items() <= pod["labels"].items() for pod in found.values())
        if manifest["kind"] in ("Deployment", "StatefulSet", "PodDisruptionBudget"):
            chosen = [n for n, pod in found.items() if selects(manifest["spec"]["selector"], pod["labels"])]
            assert chosen == [manifest["metadata"]["name"]]
    services = of_kind(manifests, "Service").values()
    for monitor in of_kind(manifests, "ServiceMonitor").values():
        chosen = [s for s in services if selects(monitor["spec"]["selector"], s["metadata"]["labels"])]
        ports = {port["name"] for service in chosen for port in service["spec"]["ports"]}
        assert len(chosen) == 1
        assert {endpoint["port"] for endpoint in monitor["spec"]["endpoints"]} <= ports


def reaches(manifests: list[Manifest], source: str, target: str, port: int) -> bool:
    """Whether the policies let one workload call another on a port."""
    found = {name: pod["labels"] for name, pod in pods(manifests).items()}
    policies = of_kind(manifests, "NetworkPolicy").values()

    def allows(here: str, there: str, direction: str, peers: str) -> bool:
        mine = [p["spec"] for p in policies if selects(p["spec"]["podSelector"], found[here])]
        return not mine or any(
            _port(rule, port) and (peers not in rule or any(_peer(peer, found[there]) for peer in rule[peers]))
            for policy in mine
            for rule in policy.get(direction, ())
        )

    return allows(source, target, "egress", "to") and allows(target, source, "ingress", "from")


def _port(rule: Mapping[str, Any], port: int) -> bool:
    ranges = [(p["port"], p.get("endPort", p["port"])) for p in rule.get("ports", ())]
    return not ranges or any(first <= port <= last for first, last in ranges)


def _peer(peer: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    return "podSelector" in peer and "namespaceSelector" not in peer and selects(peer["podSelector"], labels)


def test_network_policies_let_through_what_the_system_needs_and_no_more() -> None:
    manifests = rendered("two-models-rdma")
    controller, gateway = "pd-shadow-controller", "pd-shadow-gateway"
    p, d, other = "pd-shadow-small-prefill", "pd-shadow-small-decode", "pd-shadow-large-decode"
    assert reaches(manifests, gateway, controller, 7070)
    for engine in (p, d, other):
        assert reaches(manifests, gateway, engine, 8000)
        assert reaches(manifests, controller, engine, 8000)
        assert reaches(manifests, engine, controller, 7070)
        assert not reaches(manifests, engine, gateway, 8000)
        assert not reaches(manifests, gateway, engine, 5600)
    for here, there in ((p, d), (d, p)):
        assert reaches(manifests, here, there, 5600)
        assert reaches(manifests, here, there, 20050)
    assert not reaches(manifests, p, other, 5600)


def test_ports_of_nixl_follow_the_values() -> None:
    model = {
        "model": "m",
        "engine": {"side_channel_port": 5700},
        "prefill": {"nixlPorts": {"first": 30000, "last": 30009}},
        "decode": {},
    }
    manifests = render({"models": {"small": model}})
    p, d = "pd-shadow-small-prefill", "pd-shadow-small-decode"
    assert reaches(manifests, d, p, 5700)
    assert reaches(manifests, d, p, 30009)
    assert not reaches(manifests, d, p, 5600)
    env = {e["name"]: e.get("value") for e in pod_specs(manifests)[p]["containers"][0]["env"]}
    assert env["UCX_TCP_PORT_RANGE"] == "30000-30009"


def test_engine_pods_say_what_discovery_reads() -> None:
    for name, metadata in pods(rendered("two-models-rdma")).items():
        if "-small-" in name:
            assert metadata["labels"]["pdshadow.dev/role"] == name.rsplit("-", 1)[1]
            assert metadata["annotations"]["pdshadow.dev/model"] == "qwen3-8b"
            assert metadata["annotations"]["pdshadow.dev/port"] == "8000"
            assert metadata["annotations"]["k8s.v1.cni.cncf.io/networks"] == "kv-transfer/rdma-net"


def test_gpus_and_rdma_are_limits_and_pin_memory() -> None:
    (container,) = pod_specs(rendered("two-models-rdma"))["pd-shadow-large-decode"]["containers"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == 4
    assert container["resources"]["limits"]["rdma/hca_shared_devices_a"] == 1
    assert container["resources"]["limits"]["memory"] == "256Gi"
    assert container["securityContext"]["capabilities"]["add"] == ["IPC_LOCK"]


def test_emulated_engines_need_no_gpu_and_no_second_image() -> None:
    (container,) = pod_specs(rendered("emulated"))["pd-shadow-small-prefill"]["containers"]
    assert container["image"] == "pd-shadow:0.1.0"
    assert "nvidia.com/gpu" not in container["resources"]["limits"]
    assert container["args"][2:] == [
        "--emulated", "--config=/etc/pd-shadow/config/engine.yaml", "--name=$(POD_NAME)", "--host=$(POD_IP)",
    ]  # fmt: skip


def test_the_emulated_example_can_be_secured() -> None:
    values = {**example("secured"), **example("emulated")}
    mounts = pod_specs(render(values))["pd-shadow-small-prefill"]["containers"][0]["volumeMounts"]
    assert {"/etc/pd-shadow/client-tls", "/etc/pd-shadow/tokens"} <= {mount["mountPath"] for mount in mounts}


def test_a_new_chart_version_does_not_restart_engines_whose_settings_stay() -> None:
    labels = pods(rendered("minimal"))["pd-shadow-small-prefill"]["labels"]
    assert not {"helm.sh/chart", "app.kubernetes.io/version"} & labels.keys()


def test_images_by_registry_tag_and_digest() -> None:
    def image(**image: str) -> str:
        return str(pod_specs(render({"image": image}))["pd-shadow-gateway"]["containers"][0]["image"])

    assert image(registry="r.example.com/llm") == "r.example.com/llm/pd-shadow:0.1.0"
    assert image(tag="v2") == "pd-shadow:v2"
    assert image(tag="v2", digest=DIGEST) == f"pd-shadow@{DIGEST}"


def test_every_container_takes_its_images_digest() -> None:
    values = {
        "image": {"digest": DIGEST},
        "engines": {"image": {"digest": OTHER_DIGEST}},
        "models": {
            "real": {"model": "m", "prefill": {}, "decode": {"image": {"digest": DIGEST}}},
            "fake": {"model": "L3.1-8B", "emulated": {"enabled": True}, "colocated": {}},
        },
    }
    images = {
        name: {container["image"] for container in spec["containers"]}
        for name, spec in pod_specs(render(values)).items()
    }
    ours = {f"pd-shadow@{DIGEST}"}
    assert images == {
        **{f"pd-shadow-{part}": ours for part in ("controller", "gateway", "test", "fake-colocated")},
        "pd-shadow-real-prefill": {f"pd-shadow-vllm@{OTHER_DIGEST}"},
        "pd-shadow-real-decode": {f"pd-shadow-vllm@{DIGEST}"},
    }


@pytest.mark.parametrize("digest", ["sha256:ab", "ab" * 32, f"sha256:{'AB' * 32}", f"sha512:{'ab' * 32}"])
def test_a_digest_that_is_none_is_refused(digest: str) -> None:
    with pytest.raises(HelmError, match="digest"):
        render({"image": {"digest": digest}})


def test_every_alert_has_a_runbook() -> None:
    (rules,) = of_kind(rendered("two-models-rdma"), "PrometheusRule").values()
    alerts = [rule for group in rules["spec"]["groups"] for rule in group["rules"]]
    headings = {
        line.removeprefix("### ").strip().lower()
        for line in (CHART.parents[1] / "docs" / "operations.md").read_text().splitlines()
        if line.startswith("### ")
    }
    assert alerts
    for alert in alerts:
        anchor = alert["annotations"]["runbook_url"].rsplit("#", 1)[1]
        assert anchor == alert["alert"].lower()
        assert anchor in headings
        assert "{{ $labels" in str(alert["annotations"]) or "{{ $value" in str(alert["annotations"])


def test_notes_name_the_next_commands() -> None:
    files = chart().render(example("minimal"), name="pd-shadow", namespace="agents")
    notes = files["pd-shadow/templates/NOTES.txt"]
    assert "helm test pd-shadow -n agents" in notes
    assert "svc/pd-shadow-gateway 8000:8000" in notes
    assert "svc/pd-shadow-controller-metrics" in notes
    assert "svc/pd-shadow-controller 7070:7070" in notes
    assert "admin --address 127.0.0.1:7070 instances list" in notes
    assert "context set" not in notes
    assert "no engines" not in notes
    assert "no engines" in chart().render({}, name="x", namespace="y")["pd-shadow/templates/NOTES.txt"]


P, D = {"prefill": {}}, {"decode": {}}


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"models": {"a": {"model": "m", **P}}}, "prefill and decode go together"),
        ({"models": {"a": {"model": "m", **P, **D, "colocated": {}}}}, "mixes no roles"),
        ({"models": {"a": {"model": "m"}}}, "has no pool"),
        ({"models": {"a": {"model": "m", "colocated": {"plugin": False}}}}, "discovery.kubernetes only"),
        ({"controller": {"election": {"enabled": False}}}, "several controllers need"),
        ({"controller": {"election": {"renewDeadlineSeconds": 20}}}, "leaseDurationSeconds must be above"),
        ({"tls": {"enabled": True}}, "tls.controllerSecret"),
        ({"tls": {"enabled": True, "controllerSecret": "c"}}, "tls.clientSecret"),
        ({"tls": {"enabled": True, "certManager": {"enabled": True}}}, "issuerRef.name"),
        ({"gateway": {"terminationGracePeriodSeconds": 20}}, "not above the drain time of 28 s"),
        ({"gateway": {"autoscaling": {"enabled": True, "minReplicas": 20}}}, "minReplicas is above"),
        ({"models": {"a": {"model": "m", "colocated": {"engine": {"host_tier": {"size_gib": 32}}}}}}, "sharedMemory"),
        ({"auth": {"adminToken": {"secretName": "s"}}}, "open to anyone"),
    ],
)
def test_what_cannot_work_is_refused_with_the_fix(values: Manifest, says: str) -> None:
    with pytest.raises(HelmError, match=says):
        render(copy.deepcopy(values))


def test_names_that_kubernetes_would_cut_are_refused() -> None:
    with pytest.raises(HelmError, match="more than 52 characters"):
        render({"models": {"a" * 22: {"model": "m", **P, **D}}}, name="r" * 40)

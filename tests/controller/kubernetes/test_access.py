"""Where the API server is, and who this process is to it."""

from __future__ import annotations

from pathlib import Path

import pytest

from controller.config import KubernetesConfig
from controller.kubernetes.access import Access, AccessError

IN_CLUSTER = {"KUBERNETES_SERVICE_HOST": "10.96.0.1", "KUBERNETES_SERVICE_PORT": "443"}


@pytest.fixture
def account(tmp_path: Path) -> Path:
    """A service account as the kubelet mounts it."""
    for name, text in (("token", "secret\n"), ("ca.crt", "no certificate"), ("namespace", "inference")):
        (tmp_path / name).write_text(text)
    return tmp_path


def test_a_pod_has_all_it_needs(account: Path) -> None:
    access = Access.find(KubernetesConfig(), IN_CLUSTER, account)
    assert access == Access("https://10.96.0.1:443", account / "token", account / "ca.crt", "inference")
    assert access.headers() == {"Authorization": "Bearer secret"}
    assert access.namespace("x", None) == "inference"
    assert access.namespace("x", "given") == "given"
    (account / "token").write_text("rotated")
    assert access.headers() == {"Authorization": "Bearer rotated"}
    with pytest.raises(AccessError, match=r"ca_file: .*ca\.crt holds no certificate"):
        access.tls()


def test_an_ipv6_address_is_put_in_brackets(account: Path) -> None:
    environment = {**IN_CLUSTER, "KUBERNETES_SERVICE_HOST": "fd00::1"}
    assert Access.find(KubernetesConfig(), environment, account).url == "https://[fd00::1]:443"


def test_settings_win_and_a_proxy_needs_no_credentials(account: Path, tmp_path: Path) -> None:
    access = Access.find(KubernetesConfig(api_server="http://127.0.0.1:8001"), {}, tmp_path / "none")
    assert access == Access("http://127.0.0.1:8001", None, None, "")
    assert (access.headers(), access.tls()) == ({}, None)


def test_a_missing_file_is_named(account: Path, tmp_path: Path) -> None:
    for field in ("token_file", "ca_file"):
        config = KubernetesConfig.model_validate({field: tmp_path / "nope"})
        with pytest.raises(AccessError, match=rf"discovery\.kubernetes\.{field}: there is no file"):
            Access.find(config, IN_CLUSTER, account)

"""How to reach the API server: given in the configuration, or by the pod this process runs in."""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from controller.config import KubernetesConfig
from pd_shadow.common.address import join_address

# Where the kubelet puts the service account of a pod.
SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")


class AccessError(Exception):
    """There is no way to an API server; the message names the setting to change."""


@dataclass(frozen=True)
class Access:
    """One API server and the credentials for it; files are read when they are needed."""

    url: str
    token_file: Path | None
    ca_file: Path | None
    # The namespace of this process; empty outside a cluster.
    own_namespace: str

    @staticmethod
    def find(
        config: KubernetesConfig, environment: Mapping[str, str], service_account: Path = SERVICE_ACCOUNT
    ) -> Access:
        """Settings first, then what Kubernetes gives every pod. Raises AccessError."""
        mounted = service_account.is_dir()
        url, ca_file = config.api_server, config.ca_file
        if url is None:
            host, port = environment.get("KUBERNETES_SERVICE_HOST"), environment.get("KUBERNETES_SERVICE_PORT")
            if not host or not port:
                raise AccessError(
                    "discovery.kubernetes.api_server: this process runs outside a Kubernetes cluster; "
                    "set the URL of the API server, or of `kubectl proxy`"
                )
            url = f"https://{join_address(host, port)}"
            ca_file = ca_file or service_account / "ca.crt"
        for field, path in (("token_file", config.token_file), ("ca_file", ca_file)):
            if path is not None and not path.is_file():
                raise AccessError(f"discovery.kubernetes.{field}: there is no file {path}")
        token_file = config.token_file or (service_account / "token" if mounted else None)
        namespace = service_account / "namespace"
        own = namespace.read_text().strip() if namespace.is_file() else ""
        return Access(url, token_file, ca_file, own)

    def namespace(self, field: str, given: str | None) -> str:
        """The namespace given, or this process's own. Raises AccessError, naming the field, when there is neither."""
        if given is None and not self.own_namespace:
            raise AccessError(f"{field}: this process is in no namespace; set it")
        return given or self.own_namespace

    def headers(self) -> dict[str, str]:
        """The bearer token as it is now; raises OSError when it cannot be read."""
        if self.token_file is None:
            return {}
        return {"Authorization": f"Bearer {self.token_file.read_text().strip()}"}

    def tls(self) -> ssl.SSLContext | None:
        """For https: the API server's certificate is checked against `ca_file`, or the system's authorities."""
        if not self.url.startswith("https:"):
            return None
        try:
            return ssl.create_default_context(cafile=self.ca_file)
        except (OSError, ssl.SSLError) as error:
            raise AccessError(f"discovery.kubernetes.ca_file: {self.ca_file} holds no certificate: {error}") from error

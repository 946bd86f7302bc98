"""`pd-shadow health`: one look at a process, for probes that the kubelet cannot do itself (gRPC with TLS)."""

import ssl
import sys
import urllib.error
import urllib.request
from pathlib import Path

import click

_File = click.Path(exists=True, dir_okay=False, path_type=Path)


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("target", metavar="HOST:PORT|URL")
@click.option("--service", default="", help="grpc.health.v1 service: liveness or readiness.  [default: the server's]")
@click.option("--ca-file", type=_File, help="CA certificate of the server; given, the connection uses TLS.")
@click.option("--cert-file", type=_File, help="Client certificate, where the server asks for one.")
@click.option("--key-file", type=_File, help="Its key.")
@click.option("--server-name", help="Name in the server's certificate, where it is not the host.")
@click.option("--timeout", type=click.FloatRange(min=0.1), default=5.0, show_default=True, help="In seconds.")
def health(
    target: str,
    service: str,
    ca_file: Path | None,
    cert_file: Path | None,
    key_file: Path | None,
    server_name: str | None,
    timeout: float,
) -> None:
    """Exit with 0 if TARGET serves, 1 if it does not, 2 if it was not asked the right way.

    \b
    Examples:
      pd-shadow health 127.0.0.1:7070 --service readiness
      pd-shadow health https://gateway:8000/health --ca-file ca.crt
    """
    if (cert_file is None) != (key_file is None):
        raise click.UsageError("--cert-file and --key-file go together")
    if cert_file is not None and ca_file is None:
        raise click.UsageError("--cert-file needs --ca-file: client certificates are for TLS")
    if target.startswith(("http://", "https://")):
        answer, serving = _http(target, ca_file, timeout)
    else:
        answer, serving = _grpc(target, service, ca_file, cert_file, key_file, server_name, timeout)
    click.echo(f"{target}: {answer}", err=not serving)
    sys.exit(0 if serving else 1)


def _http(url: str, ca_file: Path | None, timeout: float) -> tuple[str, bool]:
    context = ssl.create_default_context(cafile=str(ca_file)) if ca_file is not None else None
    try:
        with urllib.request.urlopen(url, timeout=timeout, context=context) as response:
            return f"{response.status}", True
    except urllib.error.HTTPError as error:
        return f"{error.code}", False
    except OSError as error:
        return str(error), False


def _grpc(
    target: str,
    service: str,
    ca_file: Path | None,
    cert_file: Path | None,
    key_file: Path | None,
    server_name: str | None,
    timeout: float,
) -> tuple[str, bool]:
    import grpc
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    options = [("grpc.ssl_target_name_override", server_name)] if server_name else []
    if ca_file is None:
        channel = grpc.insecure_channel(target, options=options)
    else:
        credentials = grpc.ssl_channel_credentials(
            ca_file.read_bytes(),
            key_file.read_bytes() if key_file is not None else None,
            cert_file.read_bytes() if cert_file is not None else None,
        )
        channel = grpc.secure_channel(target, credentials, options=options)
    with channel:
        try:
            request = health_pb2.HealthCheckRequest(service=service)
            response = health_pb2_grpc.HealthStub(channel).Check(request, timeout=timeout)
        except grpc.RpcError as error:
            return f"{error.code().name}: {error.details()}", False
    status = health_pb2.HealthCheckResponse.ServingStatus.Name(response.status)
    return status, status == "SERVING"

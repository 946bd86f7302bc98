"""Tracing as configuration: off costs nothing, wrong values are named, a collector that is away holds up nobody."""

from __future__ import annotations

import subprocess
import sys

import pytest

from pd_shadow.common.config import ConfigError, parse
from pd_shadow.common.tracing import NO_SPAN, NO_TRACING, TracingConfig, open_tracing
from pd_shadow.gateway.config import GatewayConfig
from tests.traces import Kept, about, ids

PARENT = f"00-{'a' * 32}-{'b' * 16}-01"


def test_without_configuration_nothing_is_imported_and_nothing_recorded() -> None:
    code = (
        "import sys, pd_shadow.gateway.app, controller.server.app, pd_shadow.common.tracing as t\n"
        "assert t.open_tracing(None, 'x') is t.NO_TRACING\n"
        "sys.exit(any(name.split('.')[0] == 'opentelemetry' for name in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
    with NO_TRACING.serve("call", {"traceparent": PARENT}) as span:
        assert span.child("leg") is span is NO_SPAN is NO_TRACING.apart("x", span)
        assert span.headers() == {}
    NO_TRACING.close()


def test_missing_packages_are_an_error_that_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pd_shadow.common.otel", None)
    with pytest.raises(ConfigError, match=r"^tracing: needs the extra otel: pip install 'pd-shadow\[otel\]'"):
        open_tracing(TracingConfig(endpoint="http://127.0.0.1:4317"), "x")


@pytest.mark.parametrize(
    ("tracing", "field"),
    [
        ({}, "tracing.endpoint"),
        ({"endpoint": "collector:4317"}, "tracing.endpoint"),
        ({"endpoint": "http://collector:4317/v1/traces"}, "tracing.endpoint"),
        ({"endpoint": "http://c:4317", "sample_ratio": 1.5}, "tracing.sample_ratio"),
        ({"endpoint": "http://c:4317", "sample_rate": 1}, "did you mean 'sample_ratio'?"),
        ({"endpoint": "http://c:4317", "service_name": ""}, "tracing.service_name"),
    ],
)
def test_wrong_settings_are_named(tracing: dict[str, object], field: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse(GatewayConfig, {"tracing": tracing})
    assert field in str(error.value)


@pytest.mark.parametrize("header", ["traceparent", "Traceparent"])
def test_a_client_s_trace_is_gone_on_with(header: str) -> None:
    kept = Kept()
    with kept.tracing.serve("call", {header: PARENT, "tracestate": "vendor=1"}) as span, span.child("leg") as leg:
        headers = leg.headers()
    call = kept.named("call")
    assert ids(call)[0] == "a" * 32
    assert call.parent is not None
    assert f"{call.parent.span_id:016x}" == "b" * 16
    assert headers == {"traceparent": "00-{}-{}-01".format(*ids(kept.named("leg"))), "tracestate": "vendor=1"}


@pytest.mark.parametrize("header", ["", "nonsense", f"00-{'0' * 32}-{'b' * 16}-01", "00-" + "x" * 5000])
def test_a_traceparent_that_is_none_begins_a_new_trace(header: str) -> None:
    kept = Kept()
    kept.tracing.serve("call", {"traceparent": header}).end()
    assert kept.named("call").parent is None


def test_a_span_that_is_left_by_an_error_says_its_type_and_not_its_text() -> None:
    kept = Kept()
    span = kept.tracing.serve("call", {})
    span.set(model="m", nothing=None)

    def leave() -> None:
        with span:
            raise ValueError("the prompt was: secret")

    with pytest.raises(ValueError, match="prompt"):
        leave()
    span.end()
    (only,) = kept.spans
    assert not only.status.is_ok
    assert only.status.description == "ValueError"
    assert about(only) == {"model": "m"}
    assert only.events == ()


def test_a_collector_that_is_away_holds_up_nobody() -> None:
    tracing = open_tracing(TracingConfig(endpoint="http://127.0.0.1:9"), "x")
    tracing.serve("call", {}).end()
    tracing.close()

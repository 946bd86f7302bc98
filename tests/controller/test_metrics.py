"""What the controller's metrics say of instances."""

from typing import Any

from prometheus_client import generate_latest

from controller.config import ControllerConfig
from controller.core.instance import LoadReport
from controller.core.registry import Declared
from controller.metrics import AccessMetrics, registry_for
from controller.server.plane import Plane
from pd_shadow.api.v1 import common_pb2 as pb
from tests.controller.support import facts


def metrics(**about: Any) -> str:
    """With one decode instance that says this about itself."""
    plane = Plane(ControllerConfig())
    with plane.turn() as (cluster, now):
        cluster.declare(Declared(name="a-d0", model="a", role=pb.ROLE_DECODE, url="http://d0:8000"))
        cluster.observe(now, "a-d0", facts(**about), LoadReport())
    return generate_latest(registry_for(plane, AccessMetrics())).decode()


def test_an_engine_that_names_its_versions_is_found_by_them() -> None:
    text = metrics(vllm_version="0.33.1", plugin_version="0.1.0")
    labels = 'instance="a-d0",model="a",plugin_version="0.1.0",role="decode",vllm_version="0.33.1"'
    assert f"pd_shadow_controller_instance_info{{{labels}}} 1.0" in text


def test_a_stock_engine_has_no_versions() -> None:
    assert "instance_info{" not in metrics()

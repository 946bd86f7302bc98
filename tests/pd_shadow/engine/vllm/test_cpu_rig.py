"""The CPU-rig plugin: inert unless asked, and effective when asked."""

import os
import subprocess
import sys

import pytest

HEAVY = ("vllm", "nixl", "torch")


def run(code: str, **env: str) -> str:
    return subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **env}, capture_output=True, text=True, check=True
    ).stdout.strip()


def test_does_nothing_unless_asked() -> None:
    code = (
        "import sys; from pd_shadow.engine.vllm import cpu_rig; cpu_rig.register(); "
        f"print([m for m in {HEAVY} if m in sys.modules])"
    )
    assert run(code, PD_SHADOW_CPU_RIG="0") == "[]"


@pytest.mark.engine
def test_slows_nixl_and_shortens_the_spin_even_when_run_twice() -> None:
    code = """
import inspect, time
from pd_shadow.engine.vllm import cpu_rig
cpu_rig.register(); cpu_rig.register()
from vllm.distributed.device_communicators.shm_broadcast import SpinCondition
from nixl._api import nixl_agent, nixl_agent_config
agent = nixl_agent("quiet", nixl_agent_config(backends=["UCX"]))
before = time.process_time(); time.sleep(0.5)
print(inspect.signature(SpinCondition).parameters["busy_loop_s"].default, time.process_time() - before < 0.1)
"""
    assert run(code, PD_SHADOW_CPU_RIG="1").splitlines()[-1] == "0.001 True"

"""Quiet vLLM and NIXL on machines with few CPU cores; a vLLM general plugin that does nothing unless asked.

On a GPU host both loops below are right: each has a core to itself. On a rig where several engines share two cores
they take all of it. With PD_SHADOW_CPU_RIG=1 in the environment, every vLLM process

- lets NIXL's progress thread sleep between polls (NIXL's Python layer sets the delay to zero, one full core per
  worker at idle), and
- ends the engine's spin on its message queue after a millisecond instead of a second.

Forking the engine core and worker instead of spawning them would halve the boot time and was tried: the children keep
the server's event loop and listening socket, and now and then a server froze at its first transfer.
"""

import importlib
import os
from typing import Any

ENVIRONMENT = "PD_SHADOW_CPU_RIG"
NIXL_POLL_MICROSECONDS = 5000
MESSAGE_SPIN_SECONDS = 0.001
MARK = "_pd_shadow_cpu_rig"


def register() -> None:
    """Entry point for `vllm.general_plugins`; may run more than once per process.

    Raises RuntimeError when vLLM or NIXL no longer have the places this hooks into: an engine that quietly spins would
    spoil every measurement on the rig.
    """
    if os.environ.get(ENVIRONMENT) != "1":
        return
    _shorten_message_spin()
    _slow_nixl_progress_thread()


def _shorten_message_spin() -> None:
    condition: Any = importlib.import_module("vllm.distributed.device_communicators.shm_broadcast").SpinCondition
    defaults = condition.__init__.__defaults__
    if defaults is None or len(defaults) != 1:
        raise RuntimeError(f"{ENVIRONMENT}: vLLM's SpinCondition has changed; this plugin knows vLLM 0.32")
    condition.__init__.__defaults__ = (MESSAGE_SPIN_SECONDS,)


def _slow_nixl_progress_thread() -> None:
    # vLLM sets this just before it first imports NIXL; we import NIXL earlier.
    os.environ.setdefault("UCX_RCACHE_MAX_UNRELEASED", "1024")
    try:
        bindings: Any = importlib.import_module("nixl._bindings")
    except ImportError:
        return
    agent = bindings.nixlAgent
    if getattr(agent, MARK, False):
        return

    def quiet_agent(name: str, config: object) -> object:
        if not hasattr(config, "pthrDelay"):
            raise RuntimeError(f"{ENVIRONMENT}: NIXL's agent configuration has changed; this plugin knows NIXL 1.5")
        config.pthrDelay = NIXL_POLL_MICROSECONDS
        return agent(name, config)

    setattr(quiet_agent, MARK, True)
    bindings.nixlAgent = quiet_agent

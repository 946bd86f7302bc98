"""How fast the simulator is: cluster-seconds per second of one core, beside the same run iteration by iteration.

    python tools/bench_simulator.py [--seconds 200] [--repeats 3]

Four disaggregated instances of each of two 7B to 8B models, conversation traffic at 24.8 requests per second and model,
routed sessions and shadow work on. The baseline computes every decode iteration by itself. The two take turns, and each
one's fastest run counts: whatever else a machine does only ever makes a run slower.
"""

import argparse
import time
from unittest import mock

from pd_shadow.policy.approach import Approach
from pd_shadow.sim.config import Mode, RunConfig
from pd_shadow.sim.engine import Engine
from pd_shadow.sim.simulation import run

RATE = 24.8
"""Requests per second and model: the hour of November 2023 of the Azure conversation trace at 4.5 times its rate."""
MODEL = "Llama-3.1-8B-Instruct"


def cluster_seconds_per_second(config: RunConfig) -> float:
    """Of one of the run's two equal clusters: both of their times count."""
    began = time.perf_counter()
    result = run(config, [RATE, RATE], [3, 3])
    return len(config.models) * result.lasted / (time.perf_counter() - began)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=200.0, help="measured virtual time (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=3, help="runs of each (default: %(default)s)")
    given = parser.parse_args()
    if given.repeats < 1:
        parser.error(f"argument --repeats: {given.repeats}: must be 1 or more")
    config = RunConfig(
        models=(MODEL, "Mistral-7B-Instruct-v0.3"),
        mode=Mode.DISAGGREGATED,
        approach=Approach.HARVEST_SLO,
        seconds=given.seconds,
    )
    start_run = Engine._start_run
    ours = plain = 0.0
    for _ in range(given.repeats):
        ours = max(ours, cluster_seconds_per_second(config))
        with mock.patch.object(Engine, "_start_run", lambda self, now, most=None: start_run(self, now, 1)):
            plain = max(plain, cluster_seconds_per_second(config))
    print(f"runs of iterations   {ours:7.0f} cluster-seconds per second and core")
    print(f"iteration by iteration {plain:5.0f}")
    print(f"ratio                {ours / plain:7.1f}")


if __name__ == "__main__":
    main()

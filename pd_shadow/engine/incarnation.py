"""Which life of the engine this is: the same string whether discovery names it or the engine itself."""

import multiprocessing
import os
import time

from prometheus_client.process_collector import ProcessCollector


def incarnation() -> str:
    """Start time of the server process, in seconds since the epoch with two decimals.

    The engine core is a child of the HTTP server, whose start time its /metrics page shows and static discovery reads;
    the same library computes both. Where it cannot tell, which is where /metrics does not either, the time is now.
    """
    server = multiprocessing.parent_process()
    pid = os.getpid() if server is None else server.pid
    for family in ProcessCollector(pid=lambda: str(pid), registry=None).collect():
        if family.name == "process_start_time_seconds":
            return f"{family.samples[0].value:.2f}"
    return f"{time.time():.2f}"

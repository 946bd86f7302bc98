"""The demo's replay on the shared cluster: the figures it promises, from a session small enough for a test."""

from __future__ import annotations

import pytest

from pd_shadow.demo import report
from pd_shadow.demo.cluster import Cluster
from pd_shadow.demo.replay import Replay, Run
from pd_shadow.demo.workload import Session, build_sessions
from pd_shadow.policy.approach import DEFAULT, Approach

pytestmark = [pytest.mark.engine, pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(400)]

SEED = 1


def shortest_session(cluster: Cluster) -> Session:
    small, large = (spec.name for spec in cluster.specs)
    return min(build_sessions(6, SEED, small, large), key=lambda session: len(session.steps))


async def replay(cluster: Cluster, session: Session, approach: Approach) -> Run:
    name = f"replay-{approach}"
    async with cluster.control_plane(approach, name) as plane:
        return await Replay.over(cluster, plane, name).run([session], SEED)


async def test_cold_and_shadow_runs_say_the_same_and_the_figures_are_complete(cluster: Cluster) -> None:
    session = shortest_session(cluster)
    assert session.switches > 0
    cold, warm = [await replay(cluster, session, approach) for approach in (Approach.NO_SHADOW, DEFAULT)]
    assert cold.errors == warm.errors == []
    figures = report.build(cold, warm, seed=SEED, specs=cluster.specs, config={})
    assert figures["tokens_identical"] is True
    assert figures["tokens_compared"] > 0
    assert figures["recomputed"] == 0
    assert figures["handed_off"] >= 2 * len(session.steps)
    assert (figures["calls"], figures["switches"]) == (2 * len(session.steps), session.switches)
    assert figures["hit_rate"]["switch"]["shadow"] > figures["hit_rate"]["switch"]["cold"]
    ledger = figures["ledger"]
    assert ledger["prefilled"] == ledger["hit"] + ledger["wasted"] + ledger["resident"] > 0
    wanted = {
        "switch_ttft_s", "switch_ttft_reduction", "same_model_ttft_s", "hit_rate", "tokens_identical", "handed_off",
        "recomputed", "ledger", "d_received_tokens_at_switch", "normal", "calls", "switches", "seed",
    }  # fmt: skip
    assert wanted <= figures.keys()
    assert {"ttft_p99_ratio", "tpot_p99_ratio"} <= figures["normal"].keys()

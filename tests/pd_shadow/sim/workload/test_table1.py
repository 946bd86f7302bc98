import pytest

from pd_shadow.sim.workload.table1 import pair_rates, table1


def test_generated_sessions_are_within_a_tenth_of_the_paper_s_tables() -> None:
    rows = table1()
    assert len(rows) == 4 * 7
    assert [row for row in rows if row.ours != pytest.approx(row.paper, rel=0.10)] == []


def test_every_simulated_pair_has_a_rate_in_the_matrix() -> None:
    rates = pair_rates()
    assert len(rates) == 22
    assert all(len(set(rate.columns)) == 2 and 0.15 < rate.matrix < 0.40 for rate in rates)

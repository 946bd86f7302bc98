"""The queue of shadow legs: order and look-up."""

from types import SimpleNamespace

from hypothesis import given
from hypothesis import strategies as st

from pd_shadow.engine.jobs import Job, JobQueue
from pd_shadow.engine.tags import LegKind, ShadowTag


def job(name: str, kind: LegKind = LegKind.PREFILL, probability: float = 0.5) -> Job:
    return Job(SimpleNamespace(request_id=name), ShadowTag(kind, probability, "session"), 320, now=7.0)


def names(jobs: list[Job]) -> list[str]:
    return [job.request_id for job in jobs]


def test_the_likeliest_comes_first_then_the_first_that_came() -> None:
    queue = JobQueue()
    for name, probability in (("a", 0.2), ("b", 0.9), ("c", 0.2), ("d", 0.9), ("e", 0.0)):
        queue.add(job(name, probability=probability))
    assert names(queue.of(LegKind.PREFILL)) == ["b", "d", "a", "c", "e"]


def test_kinds_are_kept_apart() -> None:
    queue = JobQueue()
    for kind in LegKind:
        queue.add(job(str(kind), kind))
    assert [names(queue.of(kind)) for kind in LegKind] == [[str(kind)] for kind in LegKind]
    assert len(queue) == len(LegKind)
    assert {job.request_id for job in queue} == {str(kind) for kind in LegKind}


def test_a_job_is_found_and_forgotten_by_its_request() -> None:
    queue, only = JobQueue(), job("a")
    queue.add(only)
    assert "a" in queue
    assert queue.get("a") is only
    queue.remove("a")
    queue.remove("a")
    assert "a" not in queue
    assert queue.get("a") is None
    assert queue.of(LegKind.PREFILL) == list(queue) == []


def test_jobs_may_end_while_one_goes_through_them() -> None:
    queue = JobQueue()
    for name in "abc":
        queue.add(job(name))
    for one in queue:
        queue.remove(one.request_id)
    for name in "abc":
        queue.add(job(name))
    for one in queue.of(LegKind.PREFILL):
        queue.remove(one.request_id)
    assert len(queue) == 0


@given(st.lists(st.tuples(st.integers(0, 9), st.sampled_from(LegKind), st.sampled_from([0.0, 0.1, 0.5]))))
def test_the_order_holds_whatever_comes_and_goes(history: list[tuple[int, LegKind, float]]) -> None:
    queue = JobQueue()
    # Sorting anew is stable, and a dictionary keeps the order of arrival.
    expected: dict[str, Job] = {}
    for number, kind, probability in history:
        name = str(number)
        if name in expected:
            queue.remove(name)
            del expected[name]
        else:
            expected[name] = job(name, kind, probability)
            queue.add(expected[name])
        for some in LegKind:
            of_kind = [one for one in expected.values() if one.kind is some]
            assert queue.of(some) == sorted(of_kind, key=lambda one: -one.probability)

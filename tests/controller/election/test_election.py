"""The election's rules: never two leaders, whatever is lost or late."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from controller.config import ElectionConfig
from controller.election.election import Election, Record

CONFIG = ElectionConfig()


def candidate(identity: str) -> Election:
    return Election(CONFIG, identity)


def test_the_first_candidate_creates_the_lease_and_leads_until_its_deadline() -> None:
    one = candidate("one")
    record = one.claim(5.0, None, "t5")
    assert record == Record("one", 15, "t5", "t5", 0)
    assert not one.leading(5.0)
    one.written(5.0, record)
    assert one.leading(14.9)
    assert not one.leading(15.0)
    one.step_down()
    assert one.step_down_at is None


def test_a_candidate_waits_for_the_whole_duration_after_the_last_change_it_saw() -> None:
    two = candidate("two")
    held = Record("one", 15, "t0", "t0", 3)
    assert two.claim(100.0, held, "") is None
    renewed = held._replace(renewed="t2")
    assert two.claim(114.0, renewed, "") is None
    assert two.claim(128.9, renewed, "") is None
    assert two.claim(129.0, renewed, "t29") == Record("two", 15, "t29", "t29", 4)


def test_the_records_own_duration_counts() -> None:
    two = candidate("two")
    held = Record("one", 60, "t0", "t0", 0)
    assert two.claim(0.0, held, "") is None
    assert two.claim(59.0, held, "") is None
    assert two.claim(60.0, held, "t") is not None


def test_a_leader_renews_and_keeps_when_it_began() -> None:
    one = candidate("one")
    held = Record("one", 15, "t0", "t0", 3)
    assert one.claim(2.0, held, "t2") == Record("one", 15, "t0", "t2", 3)


def test_a_leader_that_sees_another_holder_leads_no_longer() -> None:
    one = candidate("one")
    one.written(0.0, Record("one", 15, "t0", "t0", 0))
    assert one.claim(1.0, Record("two", 15, "t1", "t1", 1), "t1") is None
    assert not one.leading(1.0)
    assert one.holder == "two"


def test_a_released_lease_is_free_at_once() -> None:
    one, two = candidate("one"), candidate("two")
    held = Record("one", 15, "t0", "t0", 0)
    one.written(0.0, held)
    assert two.claim(1.0, held, "t1") is None
    released = one.release(held, "t1")
    assert not one.leading(1.0)
    assert released == Record("", 1, "t1", "t1", 0)
    assert two.claim(1.1, released, "t1") == Record("two", 15, "t1", "t1", 1)
    # Nothing to give away that is another's.
    assert one.release(Record("two"), "t1") is None


def test_two_never_lead_at_once_whatever_the_times() -> None:
    """Every sequence of four tries or reads by two candidates, on a coarse clock around the deadlines."""
    steps = list(itertools.product((0.0, 9.5, 15.0), (0, 1), (True, False)))
    for sequence in itertools.product(steps, repeat=4):
        candidates, lease, now = [candidate("0"), candidate("1")], None, 0.0
        for elapsed, who, writes in sequence:
            now += elapsed
            claim = candidates[who].claim(now, lease, f"{now}")
            if claim is not None and writes:
                lease = claim
                candidates[who].written(now, claim)
            assert not (candidates[0].leading(now) and candidates[1].leading(now)), sequence


@settings(max_examples=60)
@given(st.data())
def test_two_never_lead_at_once(data: st.DataObject) -> None:
    """Three candidates with clocks of their own. Reads are old, writes arrive late, answers are late or lost."""
    skews = [0.0, 1000.0, -37.5]
    candidates = [candidate(str(index)) for index in range(3)]
    lease: Record | None = None
    version, now = 0, 0.0
    # By candidate: what it read, with the version; what it sent, when; and the answer on its way.
    claims: dict[int, tuple[Record, int]] = {}
    sent: dict[int, tuple[Record, int, float]] = {}
    answers: dict[int, tuple[Record, float]] = {}
    for _ in range(data.draw(st.integers(10, 40))):
        now += data.draw(st.sampled_from([0.0, 0.5, 3.0, 9.5, 15.0]))
        who = data.draw(st.integers(0, 2))
        local = now + skews[who]
        match data.draw(st.sampled_from(["try", "try", "read", "send", "apply", "learn", "lose", "release"])):
            case "try":
                # All of it at once, as it mostly goes.
                claim = candidates[who].claim(local, lease, f"{now}")
                if claim is not None:
                    lease, version = claim, version + 1
                    candidates[who].written(local, claim)
            case "read":
                claim = candidates[who].claim(local, lease, f"{now}")
                if claim is not None:
                    claims[who] = (claim, version)
            case "send" if who in claims:
                sent[who] = (*claims.pop(who), local)
            case "apply" if who in sent:
                record, at, when = sent.pop(who)
                if at == version:
                    lease, version = record, version + 1
                    answers[who] = (record, when)
            case "learn" if who in answers:
                record, when = answers.pop(who)
                candidates[who].written(when, record)
            case "lose":
                answers.pop(who, None)
            case "release" if lease is not None:
                released = candidates[who].release(lease, f"{now}")
                # Whoever releases has nothing else under way.
                for pending in (claims, sent, answers):
                    pending.pop(who, None)
                if released is not None:
                    lease, version = released, version + 1
        assert sum(c.leading(now + skew) for c, skew in zip(candidates, skews, strict=True)) <= 1


@pytest.mark.parametrize(
    ("given_", "says"),
    [
        ({"lease_duration_seconds": 10}, "renew_deadline_seconds: 10 must be less than lease_duration_seconds"),
        ({"retry_period_seconds": 9}, "retry_period_seconds: 9 must be less than renew_deadline_seconds / 1.2"),
        ({"lease_name": "UPPER"}, "lease_name"),
        ({"lease_duration_seconds": 2.5}, "lease_duration_seconds"),
    ],
)
def test_settings_that_let_two_lead_are_refused(given_: dict[str, object], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        ElectionConfig.model_validate(given_)

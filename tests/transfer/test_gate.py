import pytest

from pd_shadow.api.v1 import common_pb2
from transfer.gate import GateState, LinkGate
from transfer.ledger import LinkLedger


def test_a_shadow_chunk_starts_only_on_an_idle_link() -> None:
    gate = LinkGate()
    gate.begin_normal()
    assert gate.state is GateState.NORMAL_TRANSFER
    with pytest.raises(ValueError, match="normal_transfer"):
        gate.begin_shadow()
    gate.end_normal()
    gate.begin_shadow()
    with pytest.raises(ValueError, match="shadow_in_flight"):
        gate.begin_shadow()


def test_a_normal_transfer_never_waits_and_meets_one_chunk_at_most() -> None:
    gate = LinkGate()
    gate.begin_shadow()
    gate.begin_normal()
    gate.end_shadow()
    with pytest.raises(ValueError, match="takes no shadow chunk"):
        gate.begin_shadow()


def test_a_paused_link_takes_no_chunk() -> None:
    gate = LinkGate()
    gate.paused = True
    with pytest.raises(ValueError, match="paused"):
        gate.begin_shadow()


def test_ending_what_never_began_is_an_error() -> None:
    for end in (LinkGate().end_normal, LinkGate().end_shadow):
        with pytest.raises(ValueError, match="in flight"):
            end()


def test_every_gate_state_is_an_api_reason() -> None:
    names = set(common_pb2.GateReason.keys())
    assert {f"GATE_REASON_{state.name}" for state in GateState} <= names


def test_seconds_are_booked_by_kind_and_normal_wins() -> None:
    gate = LinkGate()
    ledger = LinkLedger(gate, now=10.0)
    ledger.settle(12.0)
    gate.begin_shadow()
    ledger.settle(15.0)
    gate.begin_normal()
    ledger.settle(19.0)
    gate.end_shadow()
    gate.end_normal()
    ledger.settle(20.0)
    assert (ledger.idle_seconds, ledger.shadow_seconds, ledger.normal_seconds) == (3.0, 3.0, 4.0)

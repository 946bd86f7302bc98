from pd_shadow.api.v1 import common_pb2 as pb
from pd_shadow.common.reasons import label, labels
from pd_shadow.engine.jobs import LegEnd
from pd_shadow.policy.base import StepReason


def test_labels_are_the_enum_names_without_prefix() -> None:
    assert label(pb.PlacementReason.DESCRIPTOR, pb.PLACEMENT_REASON_STICKY) == "sticky"
    assert label(pb.ShadowReason.DESCRIPTOR, pb.SHADOW_REASON_NOT_TOP_K) == "not_top_k"


def test_a_value_from_a_newer_peer_is_its_number() -> None:
    assert label(pb.Handoff.DESCRIPTOR, 99) == "99"


def test_all_labels_leave_out_unspecified() -> None:
    assert labels(pb.Handoff.DESCRIPTOR) == ["handed_off", "recomputed", "none"]


def test_every_step_reason_is_an_api_reason() -> None:
    assert labels(pb.StepReason.DESCRIPTOR) == [reason.value for reason in StepReason]
    assert [reason.name.lower() for reason in StepReason] == [reason.value for reason in StepReason]


def test_every_end_of_a_leg_is_an_api_reason() -> None:
    assert labels(pb.LegEnd.DESCRIPTOR) == [end.value for end in LegEnd]
    assert [end.name.lower() for end in LegEnd] == [end.value for end in LegEnd]

from pd_shadow.api.v1 import common_pb2 as pb
from pd_shadow.common.reasons import label, labels


def test_labels_are_the_enum_names_without_prefix() -> None:
    assert label(pb.PlacementReason.DESCRIPTOR, pb.PLACEMENT_REASON_STICKY) == "sticky"
    assert label(pb.ShadowReason.DESCRIPTOR, pb.SHADOW_REASON_NOT_TOP_K) == "not_top_k"


def test_a_value_from_a_newer_peer_is_its_number() -> None:
    assert label(pb.Handoff.DESCRIPTOR, 99) == "99"


def test_all_labels_leave_out_unspecified() -> None:
    assert labels(pb.Handoff.DESCRIPTOR) == ["handed_off", "recomputed", "none"]

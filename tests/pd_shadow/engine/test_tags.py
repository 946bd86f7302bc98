"""What the scheduler reads out of `vllm_xargs`, which a caller can fill with anything."""

import math
from collections.abc import Mapping
from typing import Any

import pytest

from pd_shadow.api.v1 import common_pb2
from pd_shadow.common.reasons import labels
from pd_shadow.engine import tags
from pd_shadow.engine.tags import CallTag, LegKind, ShadowTag, call_tag, shadow_tag


@pytest.mark.parametrize("kind", list(LegKind))
def test_a_leg_carries_its_kind_likelihood_and_session(kind: LegKind) -> None:
    given = {tags.LEG: str(kind), tags.PROBABILITY: 0.25, tags.SESSION: "s-1", "other": 1}
    assert shadow_tag(given) == ShadowTag(kind, 0.25, "s-1")


@pytest.mark.parametrize("xargs", [None, {}, {"other": 1}, {tags.LEG: "explode"}, {tags.LEG: None}, {tags.LEG: 3}])
def test_anything_else_is_a_normal_request(xargs: Mapping[str, Any] | None) -> None:
    assert shadow_tag(xargs) is None


@pytest.mark.parametrize("value", [-1, 0, "0.9", None, [1], math.nan, math.inf])
def test_a_likelihood_that_is_none_counts_as_the_least(value: Any) -> None:
    assert shadow_tag({tags.LEG: "prefill", tags.PROBABILITY: value}) == ShadowTag(LegKind.PREFILL, 0.0, "")


def test_a_call_may_be_routed_and_bring_its_own_slos() -> None:
    given = {tags.ROUTED: True, tags.SESSION: "s-1", tags.TTFT_SLO: 2, tags.TPOT_SLO: 0.05}
    assert call_tag(given) == CallTag(True, "s-1", 2.0, 0.05)


@pytest.mark.parametrize("xargs", [None, {}, {"other": 1}])
def test_a_call_without_tags_has_none(xargs: Mapping[str, Any] | None) -> None:
    assert call_tag(xargs) == CallTag(False, "", None, None)


@pytest.mark.parametrize("value", [0, -1, "fast", None, math.nan, math.inf])
def test_an_slo_that_is_none_is_left_to_the_engine(value: Any) -> None:
    tag = call_tag({tags.TTFT_SLO: value, tags.TPOT_SLO: value})
    assert (tag.ttft_slo, tag.tpot_slo) == (None, None)


def test_every_key_begins_with_what_the_gateway_strips() -> None:
    keys = (tags.LEG, tags.PROBABILITY, tags.SESSION, tags.ROUTED, tags.TTFT_SLO, tags.TPOT_SLO)
    assert all(key.startswith(tags.PREFIX) for key in keys)
    assert len(set(keys)) == len(keys)


def test_legs_are_those_of_the_api() -> None:
    assert [str(kind) for kind in LegKind] == labels(common_pb2.LegKind.DESCRIPTOR)

import pytest

from pd_shadow.api.v1 import common_pb2 as common
from pd_shadow.api.v1 import engine_pb2 as pb
from pd_shadow.common.config import ConfigError
from pd_shadow.engine.directives import (
    DROPS_KEPT,
    Directives,
    DropSession,
    PauseShadow,
    ResumeShadow,
    SetLimits,
    directive,
)
from pd_shadow.engine.settings import PluginSettings
from pd_shadow.policy.approach import EngineController


def limits(**given: object) -> pb.AttachResponse:
    return pb.AttachResponse(set_limits=pb.SetLimits(**given))  # type: ignore[arg-type]


def test_messages_become_directives() -> None:
    assert directive(pb.AttachResponse(pause_shadow=pb.PauseShadow())) == PauseShadow()
    assert directive(pb.AttachResponse(resume_shadow=pb.ResumeShadow())) == ResumeShadow()
    key = common.SessionKey(tenant="t", session_id="a/b")
    assert directive(pb.AttachResponse(drop_session=pb.DropSession(session=key))) == DropSession("t/a%2Fb")
    assert directive(limits(controller="harvest-slo", margin=0.0)) == SetLimits(
        controller=EngineController.HARVEST_SLO, margin=0.0
    )
    assert directive(pb.AttachResponse()) is None


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"controller": "magic"}, "controller"),
        ({"cap_share": 1.5}, "cap_share"),
        ({"minimum_tokens": 0}, "minimum_tokens"),
        ({"window_seconds": 0.0}, "window_seconds"),
    ],
)
def test_limits_out_of_bounds_are_refused_by_name(given: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=f"set_limits: {message}"):
        directive(limits(**given))


def test_limits_are_settings_of_the_same_names() -> None:
    assert set(SetLimits.model_fields) < set(PluginSettings.model_fields)
    assert set(SetLimits.model_fields) == set(pb.SetLimits.DESCRIPTOR.fields_by_name)


def test_the_engine_gets_what_is_in_force_and_gets_it_once() -> None:
    waiting = Directives()
    assert waiting.take() == []
    for put in (
        PauseShadow(),
        SetLimits(beta=0.5, margin=0.1),
        DropSession("/a"),
        ResumeShadow(),
        SetLimits(margin=0.2),
        DropSession("/a"),
    ):
        waiting.put(put)
    assert waiting.take() == [DropSession("/a"), SetLimits(beta=0.5, margin=0.2), ResumeShadow()]
    assert waiting.take() == []


def test_an_engine_that_never_asks_costs_bounded_memory() -> None:
    waiting = Directives()
    waiting.put(SetLimits(beta=0.25))
    for index in range(DROPS_KEPT + 10):
        waiting.put(DropSession(f"/{index}"))
    taken = waiting.take()
    assert taken[0] == DropSession("/10")
    assert taken[-1] == SetLimits(beta=0.25)
    assert len(taken) == DROPS_KEPT + 1

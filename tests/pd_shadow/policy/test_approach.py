import pytest

from pd_shadow.engine.settings import PluginSettings
from pd_shadow.policy.approach import DEFAULT, TRAITS, Approach, EngineController, for_engines, named


def test_the_approaches_of_the_papers_table_and_ours() -> None:
    assert {approach.value: traits for approach, traits in TRAITS.items()} == {
        "no-shadow": (EngineController.OFF, 0.0, False, 0.0, False),
        "host-tier": (EngineController.OFF, 0.0, True, 0.0, False),
        "harvest": (EngineController.HARVEST, 0.0, False, 0.0, False),
        "harvest-slo": (EngineController.HARVEST_SLO, 0.0, False, 0.0, False),
        "harvest-slo+host": (EngineController.HARVEST_SLO, 0.0, True, 0.0, False),
        "predictive": (EngineController.HARVEST, 0.25, False, 0.0, False),
        "eager": (EngineController.EAGER, 0.0, False, 0.0, False),
        "dedicated": (EngineController.OFF, 0.0, False, 0.0, True),
        "oracle": (EngineController.OFF, 0.0, False, 0.0, True),
        "oracle+host": (EngineController.OFF, 0.0, True, 0.0, True),
        "warm-first": (EngineController.HARVEST_SLO, 0.0, True, 10.0, False),
    }
    assert set(TRAITS) == set(Approach)


def test_engine_controllers_are_the_engines_own_words() -> None:
    for controller in EngineController:
        assert PluginSettings.model_validate({"controller": controller.value}).controller is controller


def test_names_find_their_approach() -> None:
    for approach in for_engines():
        assert named(approach.value) is approach
    assert DEFAULT in for_engines()
    assert named("oracle", among=Approach) is Approach.ORACLE


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("harvest_slo", "unknown approach 'harvest_slo'; did you mean 'harvest-slo'?"),
        ("Predictive", "did you mean 'predictive'?"),
        ("", "unknown approach ''; did you mean"),
        ("oracle", "only the simulator runs it; valid here: no-shadow, host-tier, harvest"),
    ],
)
def test_other_names_are_refused_with_the_nearest(name: str, message: str) -> None:
    with pytest.raises(ValueError, match="approach") as refused:
        named(name)
    assert message in str(refused.value)


def test_an_approach_that_cannot_run_here_is_told_so() -> None:
    with pytest.raises(ValueError, match="it cannot run here; valid here: harvest"):
        named("eager", among=[Approach.HARVEST])

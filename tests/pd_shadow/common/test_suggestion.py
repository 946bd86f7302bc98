"""The nearest name, and the line about one that nothing has."""

from __future__ import annotations

from enum import StrEnum

import pytest

from pd_shadow.common.suggestion import nearest, unknown


class Fruit(StrEnum):
    APPLE = "apple"
    PEAR = "pear"


@pytest.mark.parametrize(
    ("name", "known", "cutoff", "found"),
    [
        ("aple", ["pear", "apple"], 0.0, "apple"),
        ("aple", Fruit, 0.0, "apple"),
        # However far it is, something is nearest.
        ("", ["pear"], 0.0, "pear"),
        ("xyz", ["pear"], 0.6, None),
        ("peer", ["pear"], 0.6, "pear"),
        ("pear", [], 0.0, None),
    ],
)
def test_the_nearest_name(name: str, known: list[str], cutoff: float, found: str | None) -> None:
    assert nearest(name, known, cutoff=cutoff) == found


def test_an_unknown_name_is_told_with_the_nearest_and_all_there_are() -> None:
    assert unknown("fruit", "aple", Fruit) == "unknown fruit 'aple'; did you mean 'apple'? Valid: apple, pear"
    assert unknown("", "peer", iter(["pear", "apple"])) == "unknown 'peer'; did you mean 'pear'? Valid: pear, apple"
    assert unknown("fruit", "aple", []) == "unknown fruit 'aple'; there are none"

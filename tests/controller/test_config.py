"""Settings that cannot be: the message names the key and the fix."""

from __future__ import annotations

from typing import Any

import pytest

from controller.config import ControllerConfig
from pd_shadow.common.config import ConfigError, parse


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"discovery": {"kubernetes": {"namespaces": ["a", "a"]}}}, "'a' stands there twice; name each namespace once"),
        ({"discovery": {"kubernetes": {"namespaces": ["A/b"]}}}, "discovery.kubernetes.namespaces.0"),
        (
            {"discovery": {"kubernetes": {"api_server": "h:1"}}},
            "kubernetes.api_server: expected a base URL",
        ),
        ({"discovery": {"kubernetes": {"label_selctor": "a"}}}, "unknown key; did you mean 'label_selector'?"),
        (
            {"links": {"quarantine_seconds": 9, "max_quarantine_seconds": 8}},
            "max_quarantine_seconds: 8 must not be",
        ),
        ({"links": {"quarantine_after_failures": 0}}, "links.quarantine_after_failures"),
        ({"election": {"lease_duration_seconds": 5}}, "renew_deadline_seconds: 10 must be less than lease_duration"),
        ({"election": {"identity": ""}}, "election.identity"),
    ],
)
def test_a_mistake_is_named(given: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(ControllerConfig, given)
    assert says in str(caught.value)

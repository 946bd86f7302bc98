"""Fixtures of the gateway's tests."""

from collections.abc import AsyncIterator

import pytest
from hypothesis import HealthCheck, settings

from .rig import Rig, running

# Hypothesis judges by the wall clock; on a busy machine that says nothing about the code.
settings.register_profile("busy-machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("busy-machine")


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    """A running rig with default settings."""
    async with running() as one:
        yield one

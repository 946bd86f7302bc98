"""Fixtures of the gateway's tests."""

from collections.abc import AsyncIterator

import pytest

from .rig import Rig, running


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    """A running rig with default settings."""
    async with running() as one:
        yield one

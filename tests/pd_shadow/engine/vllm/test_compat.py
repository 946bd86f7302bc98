"""The plugin starts only on a vLLM it knows, and says what is wrong with any other."""

from types import SimpleNamespace

import pytest

from pd_shadow.engine.vllm import compat


@pytest.mark.parametrize("version", ["0.32.0", "0.32.4", "0.32.0+cpu", "0.32.1.dev3+g1234"])
def test_a_tested_minor_version_is_accepted(version: str) -> None:
    compat.check_version(version, allow_untested=False)


@pytest.mark.parametrize("version", ["0.31.2", "0.33.0", "1.32.0", "0.3.2", "dev"])
def test_another_one_is_refused_and_the_setting_named(version: str) -> None:
    with pytest.raises(compat.IncompatibleVllmError) as refused:
        compat.check_version(version, allow_untested=False)
    assert f"vLLM {version}:" in str(refused.value)
    assert "0.32.*" in str(refused.value)
    assert '"allow_untested_version": true' in str(refused.value)


def test_another_one_is_accepted_on_demand() -> None:
    compat.check_version("0.33.0", allow_untested=True)


def test_everything_that_is_missing_is_named_at_once() -> None:
    scheduler, pool = SimpleNamespace(waiting=[]), SimpleNamespace()
    with pytest.raises(compat.IncompatibleVllmError) as refused:
        compat.check_attributes(
            {"Scheduler": (scheduler, ("waiting", "running", "requests")), "BlockPool": (pool, ("touch",))}
        )
    assert "Scheduler.running, Scheduler.requests, BlockPool.touch" in str(refused.value)
    assert "Scheduler.waiting" not in str(refused.value)


def test_nothing_missing_is_no_error() -> None:
    compat.check_attributes({"Scheduler": (SimpleNamespace(waiting=[]), ("waiting",))})


class KnownQueue:
    num_free_blocks = 0

    def popleft(self) -> None: ...

    def _private(self) -> None: ...


class NewerQueue(KnownQueue):
    def popright(self) -> None: ...

    def steal(self) -> None: ...


def test_a_queue_method_that_would_bypass_the_class_is_named() -> None:
    compat.check_free_queue(KnownQueue())
    with pytest.raises(compat.IncompatibleVllmError, match="does not know: popright, steal"):
        compat.check_free_queue(NewerQueue())

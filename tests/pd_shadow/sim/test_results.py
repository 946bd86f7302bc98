"""Results as files: what is read back is what was written, or nothing."""

import gzip
from pathlib import Path

import pytest

from pd_shadow.sim import results
from pd_shadow.sim.config import RunConfig

from .rig import outcome, tiny

CONFIG = tiny()
ALL_FIELDS: dict[str, object] = {
    "models": ("Qwen2.5-7B-Instruct", "Llama-3.1-70B-Instruct"),
    "trace": "Router-R1",
    "mode": "colocated",
    "approach": "eager",
    "seed": 1,
    "instances": 3,
    "prefill_instances": 1,
    "load": 0.5,
    "window": "median",
    "normal": "azure-code",
    "normal_trace": "trace.csv",
    "sessions_per_second": 0.1,
    "router": "random",
    "switch_probability": 0.5,
    "context_window": 65_536,
    "slo_scale": 2.0,
    "chunk_tokens": 512,
    "keeps_finished": False,
    "evicts": "entries",
    "output_scale": 0.5,
    "warm_up_seconds": 6,
    "seconds": 21,
    "policy": {"beta": 0.25},
    "hardware": {"host_gb_per_gpu": 64},
}


def test_what_is_read_back_is_what_was_written(tmp_path: Path) -> None:
    result = outcome()
    assert result.calls
    results.save(tmp_path, result)
    assert results.load(tmp_path, CONFIG) == result
    assert [each.name for each in tmp_path.iterdir()] == [results.path(tmp_path, CONFIG).name]


def test_a_result_without_calls_is_read_back(tmp_path: Path) -> None:
    config = tiny(sessions_per_second=1e-9)
    result = outcome(sessions_per_second=1e-9)
    assert not result.calls
    results.save(tmp_path, result)
    assert results.load(tmp_path, config) == result


def test_there_is_none_of_another_configuration(tmp_path: Path) -> None:
    results.save(tmp_path, outcome())
    assert results.load(tmp_path, tiny(seed=1)) is None


@pytest.mark.parametrize(
    "broken",
    [
        lambda whole: b"",
        lambda whole: b"not gzip",
        lambda whole: whole[: len(whole) // 2],
        # The header stays, what is compressed does not.
        lambda whole: whole[:20] + bytes(255 - byte for byte in whole[20:]),
        lambda whole: gzip.compress(b"{"),
        lambda whole: gzip.compress(b"[]"),
        lambda whole: gzip.compress(b"{}"),
        lambda whole: gzip.compress(gzip.decompress(whole).replace(b'"ttft"', b'"tttf"')),
        lambda whole: gzip.compress(gzip.decompress(whole).replace(b'"FusionBench"', b"3")),
    ],
)
def test_a_broken_file_is_as_none(tmp_path: Path, broken) -> None:  # type: ignore[no-untyped-def]
    results.save(tmp_path, outcome())
    file = results.path(tmp_path, CONFIG)
    file.write_bytes(broken(file.read_bytes()))
    assert results.load(tmp_path, CONFIG) is None


def test_every_field_is_part_of_the_key() -> None:
    assert set(ALL_FIELDS) == set(RunConfig.model_fields)
    keys = {results.key(CONFIG)}
    for name, value in ALL_FIELDS.items():
        changed = CONFIG.model_copy(update={name: RunConfig.model_validate({**_plain(), name: value}).__dict__[name]})
        keys.add(results.key(changed))
    assert len(keys) == len(ALL_FIELDS) + 1


def test_equal_configurations_have_equal_keys() -> None:
    assert results.key(RunConfig.model_validate(CONFIG.model_dump(mode="json"))) == results.key(CONFIG)


def _plain() -> dict[str, object]:
    """A configuration that every single change of ALL_FIELDS leaves consistent."""
    return {**CONFIG.model_dump(), "mode": "disaggregated"}

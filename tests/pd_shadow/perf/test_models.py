from collections import Counter
from dataclasses import replace

import pytest

from pd_shadow.perf.gpus import H100, H200
from pd_shadow.perf.models import MODELS, PAIRS, Trace, model, pair


@pytest.mark.parametrize(
    ("degree", "names"),
    # Paper appendix B and, for the testbed, Table 4.
    [
        (1, ["Q2.5-7B", "L3.1-8B", "M-7B", "Nemo-12B", "G-7B", "G2-9B", "OSS-20B", "S7"]),
        (2, ["G2-27B", "OSS-120B", "Granite-34B", "S32"]),
        (4, ["L3.1-70B", "L3.3-70B", "Mx-8x7B", "Q72"]),
        (8, ["Mx-8x22B", "Q3N-80B"]),
    ],
)
def test_tensor_parallel_degrees_are_the_papers(degree: int, names: list[str]) -> None:
    assert {name: model(name).tensor_parallel() for name in names} == dict.fromkeys(names, degree)


@pytest.mark.parametrize(
    ("name", "total", "active"),
    # Paper Table 3, billions.
    [
        ("GPT-OSS-20B", 20.9, 3.6), ("GPT-OSS-120B", 116.8, 5.1), ("Llama-3.3-70B-Instruct", 70.6, 70.6),
        ("Qwen2.5-7B-Instruct", 7.6, 7.6), ("Qwen3-Next-80B-A3B-Instruct", 81.3, 3.8),
        ("Llama-3.1-8B-Instruct", 8.0, 8.0), ("Mistral-Nemo-12B-Instruct", 12.2, 12.2),
        ("Mistral-7B-Instruct-v0.3", 7.2, 7.2), ("Mixtral-8x22B-Instruct-v0.1", 140.6, 39.1),
        ("Gemma-2-27B-IT", 27.2, 27.2), ("Gemma-2-9B-IT", 9.2, 9.2), ("Granite-34B-Code-Instruct", 33.7, 33.7),
        ("Mixtral-8x7B-Instruct-v0.1", 46.7, 12.9), ("Gemma-7B", 8.5, 8.5),
    ],
)  # fmt: skip
def test_parameters_are_the_papers(name: str, total: float, active: float) -> None:
    spec = model(name)
    embeddings = spec.parameters - spec.layer_parameters
    assert spec.parameters / 1e9 == pytest.approx(total, abs=0.06)
    # Published active counts hold one or both embedding matrices.
    assert spec.active_layer_parameters / 1e9 < active < (spec.active_layer_parameters + embeddings) / 1e9 + 0.06
    assert spec.shared_layer_parameters > 0


@pytest.mark.parametrize(
    ("name", "bytes_per_token"),
    [("L3.1-8B", 131_072), ("M-7B", 131_072), ("Mx-8x7B", 131_072), ("Q2.5-7B", 57_344), ("Nemo-12B", 163_840),
     ("L3.1-70B", 327_680), ("G-7B", 458_752), ("G2-9B", 344_064), ("Mx-8x22B", 229_376), ("Granite-34B", 45_056),
     ("OSS-20B", 24_576), ("Q3N-80B", 24_576)],
)  # fmt: skip
def test_kv_bytes_per_token(name: str, bytes_per_token: int) -> None:
    assert model(name).kv_bytes_per_token == bytes_per_token


def test_a_context_of_100k_tokens_fills_most_of_gemmas_kv_pool() -> None:
    """Paper section 3.3."""
    assert 100_000 < model("Gemma-7B").kv_capacity_tokens() < 130_000


def test_more_gpus_than_kv_heads_hold_copies() -> None:
    granite = model("Granite-34B")
    one, two = (0.9 * 80e9 - granite.weight_bytes / degree for degree in (1, 2))
    assert granite.kv_capacity_tokens(tensor_parallel=1) == int(one / 45_056)
    assert granite.kv_capacity_tokens(tensor_parallel=2) == int(two / 45_056)
    assert model("L3.1-8B").kv_capacity_tokens(H200) > 1.9 * model("L3.1-8B").kv_capacity_tokens(H100)


def test_what_does_not_fit_is_refused() -> None:
    small = replace(H100, hbm_bytes=16e9)
    with pytest.raises(ValueError, match="state tensor_parallel"):
        model("L3.1-70B").tensor_parallel(small)
    with pytest.raises(ValueError, match=r"tensor_parallel=1: the weights of Llama-3\.1-8B-Instruct leave no room"):
        model("L3.1-8B").kv_capacity_tokens(small, 1)


def test_pairs_are_those_of_table_3() -> None:
    assert Counter(one.trace for one in PAIRS) == {
        Trace.XROUTEBENCH: 5, Trace.FUSIONBENCH: 5, Trace.ROUTER_R1: 6, Trace.GHCP_CODING: 6,
    }  # fmt: skip
    assert len({(one.trace, one.label) for one in PAIRS}) == 22
    assert all(one.small.parameters < one.large.parameters for one in PAIRS)
    gemma = pair("GHCP-coding", "G-7B / Mx-8x7B")
    assert (gemma.small.name, gemma.large.name) == ("Gemma-7B", "Mixtral-8x7B-Instruct-v0.1")


def test_models_go_by_full_name_and_by_label() -> None:
    assert all(model(spec.name) is model(spec.label) is spec for spec in MODELS.values())
    assert model("L70") is model("Llama-3.1-70B-Instruct")


def test_an_unknown_name_is_answered_with_the_nearest() -> None:
    with pytest.raises(ValueError, match=r"'Llama-3\.1-8B-Instrukt'; did you mean 'Llama-3\.1-8B-Instruct'"):
        model("Llama-3.1-8B-Instrukt")
    with pytest.raises(ValueError, match=r"did you mean 'M-7B / Mx-8x22B'"):
        pair(Trace.FUSIONBENCH, "M-7B / Mx-8x7B")
    with pytest.raises(ValueError, match="did you mean 'FusionBench'"):
        pair("FusionBnch", "M-7B / Mx-8x22B")

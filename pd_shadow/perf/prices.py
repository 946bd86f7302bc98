"""Dollars per token, per model and benchmark.

The paper: "each benchmark's per-model prices, with cached input billed at 10% of uncached" (section 5.1).
"""

from collections.abc import Mapping
from typing import NamedTuple

from pd_shadow.perf.models import ModelSpec, Trace

CACHED_INPUT_SHARE = 0.1
"""Price of a cached input token in prices of an uncached one."""
TOKENS_PER_PRICE = 1_000_000


class Price(NamedTuple):
    """Dollars per million tokens."""

    input: float
    output: float


def _flat(dollars: float) -> Price:
    return Price(dollars, dollars)


PRICES: Mapping[str, Price] = {
    # ulab-uiuc/LLMRouter (MIT), llmrouter/data/example_data/llm_candidates/default_llm.json at ebdba86: the fields
    # input_price and output_price (for Qwen2.5-7B its prose says 0.30).
    "Qwen2.5-7B-Instruct": _flat(0.20),
    "Gemma-2-9B-IT": _flat(0.10),
    "Llama-3.1-8B-Instruct": _flat(0.20),
    "Mistral-7B-Instruct-v0.3": _flat(0.20),
    "Mistral-Nemo-12B-Instruct": _flat(0.30),
    "Mixtral-8x7B-Instruct-v0.1": _flat(0.60),
    "Mixtral-8x22B-Instruct-v0.1": _flat(1.20),
    # ulab-uiuc/FusionFactory (FusionBench), query_level/GraphRouter/configs/new_LLM_Descriptions.json at 73c3235; the
    # two lists agree where they overlap.
    "Gemma-7B": _flat(0.20),
    "Llama-3.1-70B-Instruct": _flat(0.90),
    "Granite-34B-Code-Instruct": _flat(0.80),
    # In neither list: Together AI's serverless prices, which Router-R1 tells its users to take.
    "GPT-OSS-20B": Price(0.05, 0.20),
    "GPT-OSS-120B": Price(0.15, 0.60),
    "Qwen3-Next-80B-A3B-Instruct": Price(0.15, 1.50),
    # In none: what the lists ask for other models of that size (7-8B 0.20, 27-34B 0.80, 70B 0.90).
    "Llama-3.3-70B-Instruct": _flat(0.90),
    "Gemma-2-27B-IT": _flat(0.80),
    "SWE-agent-LM-7B": _flat(0.20),
    "SWE-agent-LM-32B": _flat(0.80),
    "Qwen2.5-72B-Instruct": _flat(0.90),
}

# API_PRICE_1M_TOKENS of Router-R1 (ulab-uiuc/Router-R1, router_r1/llm_agent/route_service.py), which charges output
# alone; here the same for input. Read from copies of that file: the original was not to be had.
ROUTER_R1_PRICES: Mapping[str, Price] = {
    "Qwen2.5-7B-Instruct": _flat(0.30),
    "Llama-3.1-70B-Instruct": _flat(0.88),
    "Llama-3.1-8B-Instruct": _flat(0.18),
    "Mistral-7B-Instruct-v0.3": _flat(0.20),
    "Mixtral-8x22B-Instruct-v0.1": _flat(1.20),
    "Gemma-2-27B-IT": _flat(0.80),
}


def price_of(model: ModelSpec, trace: Trace | None = None) -> Price:
    """The model's price in that benchmark, or in general. Raises ValueError for a model without one."""
    price = (ROUTER_R1_PRICES.get(model.name) if trace is Trace.ROUTER_R1 else None) or PRICES.get(model.name)
    if price is None:
        raise ValueError(f"model {model.name!r} has no price; add it to PRICES. Known: {', '.join(PRICES)}")
    return price


def call_cost(price: Price, prompt_tokens: int, cached_tokens: int, output_tokens: int) -> float:
    """Dollars of one call; `cached_tokens` of the prompt were found cached.

    Raises ValueError if more tokens are cached than the prompt has, or a count is negative.
    """
    if not 0 <= cached_tokens <= prompt_tokens:
        raise ValueError(f"cached_tokens={cached_tokens}: must be 0 to prompt_tokens={prompt_tokens}")
    if output_tokens < 0:
        raise ValueError(f"output_tokens={output_tokens}: must not be negative")
    billed = prompt_tokens - cached_tokens + CACHED_INPUT_SHARE * cached_tokens
    return (billed * price.input + output_tokens * price.output) / TOKENS_PER_PRICE

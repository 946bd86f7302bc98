"""The capacity of one instance as the paper's testbed defines it (appendix D.1), in as few lines as it takes.

Continuous batching: decodes first, then prompt chunks in order of arrival up to 2,048 tokens per iteration and 256
sequences (the testbed's own settings are not stated). KV capacity is not modelled: at these loads it is never short.
"""

import heapq
import math
import random
from collections import deque
from itertools import pairwise

from pd_shadow.perf.latency import PREFILL_CHUNK_TOKENS, IterationLatency
from pd_shadow.perf.online import StepWork

TESTBED_REQUESTS_PER_SECOND = {
    "Qwen2.5-7B-Instruct": 12.8,
    "Llama-3.1-8B-Instruct": 11.0,
    "Llama-3.1-70B-Instruct": 3.8,
    "SWE-agent-LM-7B": 13.3,
    "SWE-agent-LM-32B": 4.8,
    "Qwen2.5-72B-Instruct": 3.8,
}
"""Capacities of appendix D.1, in its order."""

# Quantiles (share of requests, tokens) of the Azure conversation trace of 2024, CC-BY 4.0, between which lengths are
# drawn log-linearly; the first points are set to bring the means (1,627 and 113) near the trace's, 1,632 and 106.
PROMPT_QUANTILES = ((0.0, 280), (0.5, 928), (0.9, 3830), (0.99, 6683), (1.0, 7999))
OUTPUT_QUANTILES = ((0.0, 1), (0.5, 41), (0.9, 342), (0.95, 455), (0.99, 694), (1.0, 1024))
MAX_SEQUENCES = 256
TARGET_ATTAINMENT = 0.9


def draw(rng: random.Random, quantiles: tuple[tuple[float, int], ...]) -> int:
    share = rng.random()
    for (low, shortest), (high, longest) in pairwise(quantiles):
        if share <= high:
            return round(math.exp(math.log(shortest) + (share - low) / (high - low) * math.log(longest / shortest)))
    raise AssertionError(quantiles)


def attainment(latency: IterationLatency, requests_per_second: float, *, requests: int = 4000, seed: int = 0) -> float:
    """Share of requests that meet both SLOs, the first tenth left out."""
    rng = random.Random(seed)
    arrivals: list[tuple[float, int, int]] = []
    now = 0.0
    for _ in range(requests):
        now += rng.expovariate(1.0) / requests_per_second
        arrivals.append((now, draw(rng, PROMPT_QUANTILES), draw(rng, OUTPUT_QUANTILES)))
    context = sum(prompt for _, prompt, _ in arrivals) // requests
    tpot_slo = max(0.025, 5 * latency.decode_seconds(context))

    clock, coming, iteration = 0.0, 0, 0
    prefilling: deque[list[int]] = deque()  # [request, prompt tokens done]
    # (last iteration, request, tokens held then) of decoding sequences, and their tokens in KV now.
    decoding: list[tuple[int, int, int]] = []
    kv_tokens = 0
    first_token = [0.0] * requests
    met = 0
    while coming < requests or prefilling or decoding:
        while coming < requests and arrivals[coming][0] <= clock:
            prefilling.append([coming, 0])
            coming += 1
        if not prefilling and not decoding:
            clock = arrivals[coming][0]
            continue
        work = StepWork(0, 0.0, len(decoding), kv_tokens)
        room = PREFILL_CHUNK_TOKENS - len(decoding)
        finished: list[int] = []
        while prefilling and room > 0 and len(decoding) + len(finished) < MAX_SEQUENCES:
            request, done = prefilling[0]
            chunk = min(room, arrivals[request][1] - done)
            work = work.with_prefill(chunk, done)
            room -= chunk
            if done + chunk < arrivals[request][1]:
                prefilling[0][1] += chunk
                break
            prefilling.popleft()
            finished.append(request)
        clock += latency.seconds(work)
        kv_tokens += len(decoding)
        while decoding and decoding[0][0] == iteration:
            _, request, held = heapq.heappop(decoding)
            kv_tokens -= held
            tpot = (clock - first_token[request]) / (arrivals[request][2] - 1)
            met += request >= requests // 10 and tpot <= tpot_slo and _ttft_met(latency, arrivals, first_token, request)
        for request in finished:
            _, prompt, output = arrivals[request]
            first_token[request] = clock
            if output == 1:
                met += request >= requests // 10 and _ttft_met(latency, arrivals, first_token, request)
                continue
            heapq.heappush(decoding, (iteration + output - 1, request, prompt + output - 1))
            kv_tokens += prompt
        iteration += 1
    return met / (requests - requests // 10)


def _ttft_met(
    latency: IterationLatency, arrivals: list[tuple[float, int, int]], first_token: list[float], request: int
) -> bool:
    arrived, prompt, _ = arrivals[request]
    return first_token[request] - arrived <= max(1.0, 5 * latency.isolated_prefill_seconds(prompt))


def capacity(latency: IterationLatency, *, resolution: float = 0.02, requests: int = 4000, seed: int = 0) -> float:
    """The highest rate, in requests per second, at which 90 % of requests meet both SLOs."""
    low, high = 0.1, 100.0
    while high / low > 1 + resolution:
        middle = math.sqrt(low * high)
        if attainment(latency, middle, requests=requests, seed=seed) >= TARGET_ATTAINMENT:
            low = middle
        else:
            high = middle
    return low

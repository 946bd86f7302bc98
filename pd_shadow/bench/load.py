"""The load generator of one engine: normal requests when they are due, shadow work all the time, every token timed."""

import asyncio
import contextlib
import statistics
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from typing import Any

import aiohttp
import orjson

from pd_shadow.bench.modes import Mode
from pd_shadow.bench.samples import Leg, Phase, Sample
from pd_shadow.bench.slo import Isolated
from pd_shadow.bench.traffic import OUTPUT_TOKENS, PROMPT_TOKENS, Context, Request, Traffic
from pd_shadow.engine import tags
from pd_shadow.gateway.sse import DONE, SseSplitter, parse

TIMEOUT = aiohttp.ClientTimeout(total=120)
SHADOW_SESSIONS_IN_FLIGHT = 3
"""With one leg each: the engine has the next when one ends."""
SETTLE_SECONDS = 20.0
"""A phase opens when a first leg has ended, or after so long without one."""
RETRY_SECONDS = 0.25
"""Pause of a session whose leg computed nothing."""
FAILED = "failed"
ISOLATED_PROMPT_TOKENS = (PROMPT_TOKENS[0], sum(PROMPT_TOKENS) // 2, PROMPT_TOKENS[1])
ISOLATED_OUTPUT_TOKENS = 64
ISOLATED_REPEATS = 7

OnRequest = Callable[[], None]


class Load:
    """Load on the engine at `url`. Shadow sessions continue from phase to phase, so that none is asked for twice.

    Failures of single requests are values in what comes back; whether the engine lives is for its owner to check.
    """

    def __init__(self, http: aiohttp.ClientSession, url: str, model: str, mode: Mode, traffic: Traffic) -> None:
        self._http = http
        self._completions = f"{url}/v1/completions"
        self._model = model
        self._mode = mode
        self._traffic = traffic
        self._contexts: Iterator[Context] = traffic.contexts()

    async def warm_up(self, requests: int, shadow_seconds: float) -> None:
        """First steps of the engine, normal ones and, in modes that have it, shadow work alone.

        Raises RuntimeError when a request fails.
        """
        spread = range(
            PROMPT_TOKENS[0], PROMPT_TOKENS[1] + 1, max(1, (PROMPT_TOKENS[1] - PROMPT_TOKENS[0]) // requests)
        )
        for number, tokens in enumerate(spread):
            await self._alone(f"warm-up-{number}", tokens, OUTPUT_TOKENS)
        if self._mode.has_shadow:
            async with self._shadow_work([]):
                await asyncio.sleep(shadow_seconds)

    async def isolated(self) -> Isolated:
        """Time to first token by prompt length and time per token, of requests that run alone; medians.

        Raises RuntimeError when a request fails.
        """
        prefill = []
        decodes = []
        for tokens in ISOLATED_PROMPT_TOKENS:
            samples = [
                await self._alone(f"isolated-{tokens}-{number}", tokens, ISOLATED_OUTPUT_TOKENS)
                for number in range(ISOLATED_REPEATS)
            ]
            prefill.append((tokens, statistics.median(sample.ttft for sample in samples)))
            decodes += [sample.tpot for sample in samples]
        return Isolated(prefill, statistics.median(decodes))

    async def open_loop(self, requests: Sequence[Request], on_request: OnRequest) -> Phase:
        """Send every request when it is due, whether earlier ones have ended or not, under shadow work."""
        phase = Phase()
        async with self._shadow_work(phase.legs):
            phase.opened = time.monotonic()

            async def one(request: Request, due: float) -> None:
                phase.samples.append(await self._stream(request, due))
                on_request()

            async with asyncio.TaskGroup() as group:
                for request in requests:
                    due = phase.opened + request.at
                    await asyncio.sleep(max(0.0, due - time.monotonic()))
                    group.create_task(one(request, due))
            phase.closed = time.monotonic()
        return phase

    async def closed_loop(
        self, requests: Sequence[Request], in_flight: int, *, shadow: bool, on_request: OnRequest
    ) -> Phase:
        """Send the requests in order, the next when one ends, with shadow work or without."""
        phase = Phase()
        waiting = list(reversed(requests))

        async def worker() -> None:
            while waiting:
                phase.samples.append(await self._stream(waiting.pop(), time.monotonic()))
                on_request()

        async with self._shadow_work(phase.legs) if shadow else contextlib.nullcontext():
            phase.opened = time.monotonic()
            async with asyncio.TaskGroup() as group:
                for _ in range(in_flight):
                    group.create_task(worker())
            phase.closed = time.monotonic()
        return phase

    async def _alone(self, name: str, prompt_tokens: int, output_tokens: int) -> Sample:
        request = self._traffic.request(name, prompt_tokens, output_tokens)
        sample = await self._stream(request, time.monotonic())
        if sample.error:
            raise RuntimeError(f"{self._mode}: a request to the idle engine failed: {sample.error}")
        return sample

    async def _stream(self, request: Request, due: float) -> Sample:
        body: dict[str, Any] = {
            "model": self._model,
            "prompt": request.prompt,
            "max_tokens": request.output_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "return_token_ids": True,
        }
        if request.cache_salt:
            body["cache_salt"] = request.cache_salt
        if request.routed:
            body["vllm_xargs"] = {tags.ROUTED: 1}
        tokens = len(request.prompt)
        times: list[float] = []
        try:
            async with self._post(body) as response:
                if response.status != 200:
                    return Sample(tokens, error=f"HTTP {response.status}: {(await response.text())[:300]}")
                events = SseSplitter()
                async for data in response.content.iter_any():
                    now = time.monotonic() - due
                    for event in events.feed(data):
                        if event == DONE:
                            continue
                        chunk = parse(event) or {}
                        if "error" in chunk:
                            return Sample(tokens, error=f"in the stream: {str(chunk['error'])[:300]}")
                        for choice in chunk.get("choices", []):
                            times += [now] * len(choice.get("token_ids") or [])
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            return Sample(tokens, error=f"{type(error).__name__}: {error}")
        if len(times) != request.output_tokens:
            return Sample(tokens, error=f"the stream ended after {len(times)} of {request.output_tokens} tokens")
        return Sample(tokens, tuple(times))

    @contextlib.asynccontextmanager
    async def _shadow_work(self, legs: list[Leg]) -> AsyncIterator[None]:
        """Shadow work under way for as long as the block runs; what is unfinished then is given up."""
        if not self._mode.has_shadow:
            yield
            return
        under_way = asyncio.Event()
        async with asyncio.TaskGroup() as group:
            sessions = [group.create_task(self._sessions(legs, under_way)) for _ in range(SHADOW_SESSIONS_IN_FLIGHT)]
            try:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(SETTLE_SECONDS):
                        await under_way.wait()
                yield
            finally:
                for session in sessions:
                    session.cancel()

    async def _sessions(self, legs: list[Leg], under_way: asyncio.Event) -> None:
        for context in self._contexts:
            for prefix in context.prefixes():
                leg = await self._leg(context.session, prefix)
                legs.append(leg)
                if leg.computed_tokens:
                    under_way.set()
                else:
                    await asyncio.sleep(RETRY_SECONDS)

    async def _leg(self, session: str, prefix: Sequence[int]) -> Leg:
        body: dict[str, Any] = {
            "model": self._model,
            "prompt": prefix,
            "max_tokens": 1,
            "temperature": 0,
            **self._mode.shadow_fields(session),
        }
        try:
            async with self._post(body) as response:
                if response.status != 200:
                    return _failed(f"HTTP {response.status}: {(await response.text())[:300]}")
                answer = await response.json()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            return _failed(f"{type(error).__name__}: {error}")
        return _plugin_leg(answer) if self._mode.has_plugin else _stock_leg(answer)

    def _post(self, body: Mapping[str, Any]) -> Any:
        headers = {"Content-Type": "application/json"}
        return self._http.post(self._completions, data=orjson.dumps(body), headers=headers, timeout=TIMEOUT)


def _failed(error: str) -> Leg:
    return Leg(time.monotonic(), 0, FAILED, error)


def _plugin_leg(answer: Mapping[str, Any]) -> Leg:
    result = (answer.get("kv_transfer_params") or {}).get(tags.RESULT)
    if not isinstance(result, Mapping):
        return _failed(f"the answer to a shadow leg has no kv_transfer_params.{tags.RESULT}: is the plugin on?")
    return Leg(time.monotonic(), int(result["computed_tokens"]), str(result["end"]))


def _stock_leg(answer: Mapping[str, Any]) -> Leg:
    usage = answer["usage"]
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    return Leg(time.monotonic(), usage["prompt_tokens"] - cached, "done")

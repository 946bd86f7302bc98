"""A streaming OpenAI chat client that keeps what the demo compares: times, token ids, usage."""

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import aiohttp

TIMEOUT = aiohttp.ClientTimeout(total=180)


@dataclass(frozen=True)
class Answer:
    """One completed call. Times in seconds as the client saw them; `error` is empty for a good call."""

    error: str = ""
    text: str = ""
    token_ids: tuple[int, ...] = ()
    ttft: float = 0.0
    tpot: float = 0.0
    prompt_tokens: int = 0
    cached_tokens: int = 0


async def chat(
    http: aiohttp.ClientSession,
    base_url: str,
    model: str,
    messages: Sequence[Mapping[str, str]],
    max_tokens: int,
    cache_salt: str,
    headers: Mapping[str, str] | None = None,
) -> Answer:
    """Ask greedily and stream. Failures come back as `error`, so that a replay ends with a count and not a trace."""
    body = {
        "model": model,
        "messages": list(messages),
        "max_tokens": max_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
        "cache_salt": cache_salt,
    }
    started = time.perf_counter()
    try:
        async with http.post(
            f"{base_url}/v1/chat/completions", json=body, headers=headers, timeout=TIMEOUT
        ) as response:
            if response.status != 200:
                return Answer(error=f"HTTP {response.status}: {(await response.text())[:300]}")
            return await _read(response, started, max_tokens)
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        return Answer(error=f"{type(error).__name__}: {error}")


async def _read(response: aiohttp.ClientResponse, started: float, max_tokens: int) -> Answer:
    text: list[str] = []
    ids: list[int] = []
    first = last = 0.0
    usage: dict[str, object] = {}
    async for line in response.content:
        if not line.startswith(b"data: {"):
            continue
        chunk = json.loads(line[6:])
        if "error" in chunk:
            return Answer(error=f"in the stream: {json.dumps(chunk['error'])[:300]}")
        usage = chunk.get("usage") or usage
        for choice in chunk.get("choices", []):
            text.append(choice["delta"].get("content") or "")
            new = choice.get("token_ids") or []
            if new:
                last = time.perf_counter() - started
                first = first or last
                ids += new
    if len(ids) != max_tokens:
        return Answer(error=f"the stream ended after {len(ids)} of {max_tokens} tokens")
    details = usage.get("prompt_tokens_details")
    cached = details.get("cached_tokens") if isinstance(details, dict) else None
    prompt = usage.get("prompt_tokens")
    return Answer(
        text="".join(text),
        token_ids=tuple(ids),
        ttft=first,
        tpot=(last - first) / max(1, len(ids) - 1),
        prompt_tokens=prompt if isinstance(prompt, int) else 0,
        cached_tokens=cached if isinstance(cached, int) else 0,
    )

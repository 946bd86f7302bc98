"""A real vLLM engine inside a test's own process, stepped by hand; and a fresh process to run it in.

vLLM keeps process-wide state, so a process holds one engine: a test hands a scenario (a function of its module) to
`in_fresh_process`, the scenario builds a `SteppedEngine` and returns what it saw as JSON. One iteration per `step`
makes a scheduler's decisions repeatable. Importing vLLM takes far longer than its small engine, and is done once.
"""

import faulthandler
import functools
import json
import multiprocessing
import os
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

import pytest

from pd_shadow.demo import models
from pd_shadow.demo.cluster import free_ports

# The tokens of this model depend on its whole context, so equal tokens mean equal KV.
MODEL = models.SMALL
# Built models are the same for every run of this version; the end-to-end tests use the same folder.
MODEL_CACHE = Path(tempfile.gettempdir()) / "pd-shadow-e2e-models"
BLOCK_SIZE = 32
"""Tokens; the smallest block that vLLM's CPU attention takes."""
# Everything slow to import that engines share, but NIXL, which starts threads.
PRELOADED = ["vllm.v1.engine.llm_engine", "vllm.v1.worker.cpu_worker", "pd_shadow.engine.vllm.scheduler"]
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "PD_SHADOW_CPU_RIG": "1",
    "PYTHONHASHSEED": "0",
    "TOKENIZERS_PARALLELISM": "false",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    # Without these two vLLM's CPU platform moves the worker to a process of its own.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    # Tests find their requests in the scheduler under the ids they gave.
    "VLLM_DISABLE_REQUEST_ID_RANDOMIZATION": "1",
    "VLLM_DO_NOT_TRACK": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
}
# After which, and again after which, a scenario writes where it stands.
STALLED_SECONDS = 120
# How much of a failed scenario's output its test shows.
TAIL_CHARACTERS = 6000


def in_fresh_process(scenario: Callable[..., Any], *, env: Mapping[str, str] | None = None, **arguments: Any) -> Any:
    """Run a module-level function in a process of its own, which has vLLM imported, and return what it returned.

    Arguments and the result travel as JSON. `env` comes on top of the environment an in-process engine needs. Fails
    the test with the end of the process's output when the scenario raises.
    """
    # vLLM's own default is one port, and it waits for ever where another engine of the machine has that.
    (side_channel,) = free_ports(1)
    env = {"VLLM_NIXL_SIDE_CHANNEL_PORT": str(side_channel), **(env or {})}
    with tempfile.TemporaryDirectory() as folder:
        output, result = Path(folder) / "output", Path(folder) / "result.json"
        given = json.dumps(arguments)
        process = _processes().Process(target=_run_scenario, args=(scenario, given, env, output, result))
        process.start()
        try:
            process.join()
        except BaseException:
            # The test's own time limit: where the scenario stands is in its output by now.
            sys.stderr.write(output.read_text()[-TAIL_CHARACTERS:])
            raise
        finally:
            process.kill()
        if process.exitcode != 0:
            raise AssertionError(f"{scenario.__qualname__} failed:\n{output.read_text()[-TAIL_CHARACTERS:]}")
        return json.loads(result.read_text())


@functools.cache
def _processes() -> ForkServerContext:
    """Processes forked from one that imported vLLM once and did nothing else: no thread, no engine, no connection."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    # The server, and with it every scenario, starts with the environment of this moment.
    with pytest.MonkeyPatch.context() as patch:
        for name, value in ENVIRONMENT.items():
            patch.setenv(name, value)
        forkserver.ensure_running()
    return context


def _run_scenario(scenario: Callable[..., Any], given: str, env: dict[str, str], output: Path, result: Path) -> None:
    """The other process's side of `in_fresh_process`."""
    descriptor = os.open(output, os.O_WRONLY | os.O_CREAT)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    faulthandler.dump_traceback_later(STALLED_SECONDS, repeat=True)
    os.environ.update(env)
    result.write_text(json.dumps(scenario(**json.loads(given))))


@dataclass
class Answer:
    """What one request has got so far. Lengths are in tokens."""

    prompt_tokens: int
    token_ids: list[int] = field(default_factory=list)
    cached_tokens: int | None = None
    """Found cached, locally or by a connector; None until the request was admitted."""
    finish_reason: str | None = None
    """None while the request is unfinished."""
    kv_transfer_params: dict[str, Any] | None = None


class SteppedEngine:
    """One vLLM engine. Every iteration is asked for; `answers` and `steps` say what came of it.

    `answers`: by request id. `steps`: for every iteration the tokens it computed, by request id; an iteration that
    only waited for a connector is an empty mapping.
    """

    def __init__(self, *, ahead: int = 0, **engine_arguments: Any) -> None:
        """Arguments are vLLM's EngineArgs and win over the small defaults here: 64 blocks of 32 tokens.

        So many steps `ahead` are scheduled before a step's output is looked at, as on GPUs: one with asynchronous
        scheduling, more with pipeline parallelism. vLLM's CPU platform never does so by itself, and its stock scheduler
        is not made for it.
        """
        from vllm.engine.arg_utils import EngineArgs
        from vllm.v1.engine.llm_engine import LLMEngine

        model = engine_arguments.pop("model", None) or str(models.build(MODEL, MODEL_CACHE))
        defaults: dict[str, Any] = {
            "block_size": BLOCK_SIZE,
            "distributed_executor_backend": "uni",
            "dtype": "float32",
            "enable_prefix_caching": True,
            "enforce_eager": True,
            "max_model_len": 1024,
            "max_num_batched_tokens": 256,
            "max_num_seqs": 16,
            "num_gpu_blocks_override": 64,
            "scheduling_policy": "priority",
            "seed": 0,
            "skip_tokenizer_init": True,
        }
        self.engine = LLMEngine.from_engine_args(EngineArgs(model=model, **{**defaults, **engine_arguments}))
        self.answers: dict[str, Answer] = {}
        self.steps: list[dict[str, int]] = []
        if ahead:
            core = self.engine.engine_core.engine_core
            core.batch_queue, core.batch_queue_size = deque(maxlen=ahead + 1), ahead + 1
            core.step_fn = core.step_with_batch_queue
        self._observe_schedule()

    @property
    def scheduler(self) -> Any:
        """vLLM's scheduler, or the subclass under test."""
        return self.engine.engine_core.engine_core.scheduler

    @property
    def block_pool(self) -> Any:
        """The KV pool's blocks."""
        return self.scheduler.kv_cache_manager.block_pool

    @property
    def free_blocks(self) -> int:
        """Blocks no request holds, cached ones included."""
        return int(self.block_pool.get_num_free_blocks())

    def add(
        self,
        prompt_token_ids: Sequence[int],
        request_id: str,
        max_tokens: int = 1,
        *,
        priority: int = 0,
        extra_args: Mapping[str, Any] | None = None,
        kv_transfer_params: Mapping[str, Any] | None = None,
        cache_salt: str | None = None,
        session_id: str | None = None,
    ) -> None:
        """Queue a greedy request; nothing is computed before the next step."""
        from vllm import SamplingParams
        from vllm.inputs import TokensPrompt

        extra = dict(extra_args or {})
        if kv_transfer_params is not None:
            extra["kv_transfer_params"] = dict(kv_transfer_params)
        prompt = TokensPrompt(prompt_token_ids=list(prompt_token_ids))
        if cache_salt is not None:
            prompt["cache_salt"] = cache_salt
        sampling = SamplingParams(
            max_tokens=max_tokens, temperature=0, ignore_eos=True, detokenize=False, extra_args=extra or None
        )
        self.engine.add_request(request_id, prompt, sampling, priority=priority, session_id=session_id)
        self.answers[request_id] = Answer(len(prompt_token_ids))

    def step(self) -> dict[str, int]:
        """One iteration; returns the tokens it computed, by request id."""
        before = len(self.steps)
        for output in self.engine.step():
            answer = self.answers[output.request_id]
            answer.token_ids = list(output.outputs[0].token_ids)
            answer.cached_tokens = output.num_cached_tokens
            answer.kv_transfer_params = output.kv_transfer_params
            answer.finish_reason = output.outputs[0].finish_reason
        return self.steps[-1] if len(self.steps) > before else {}

    def abort(self, *request_ids: str) -> None:
        """End requests as a disconnected client would."""
        self.engine.abort_request(list(request_ids))
        for request_id in request_ids:
            self.answers[request_id].finish_reason = "abort"

    def drain(self, limit_seconds: float = 60) -> dict[str, Answer]:
        """Step until no request is left and connectors have nothing in flight; returns all answers.

        The limit is for engines that hang: it fails the test with the scheduler's state.
        """
        deadline = time.monotonic() + limit_seconds
        core = self.engine.engine_core.engine_core
        while self.engine.has_unfinished_requests() or self.scheduler.has_requests() or core.batch_queue:
            self.step()
            if time.monotonic() > deadline:
                unfinished = [key for key, answer in self.answers.items() if answer.finish_reason is None]
                running = [request.request_id for request in self.scheduler.running]
                raise AssertionError(
                    f"not drained after {limit_seconds:g} s and {len(self.steps)} iterations; "
                    f"unfinished: {unfinished}; running: {running}; waiting: {len(self.scheduler.waiting)}; "
                    f"known to the scheduler: {list(self.scheduler.requests)}; free blocks: {self.free_blocks}"
                )
        return self.answers

    def run(self, prompt_token_ids: Sequence[int], request_id: str, max_tokens: int = 1, **more: Any) -> Answer:
        """Add one request and drain; keywords as for `add`."""
        self.add(prompt_token_ids, request_id, max_tokens, **more)
        return self.drain()[request_id]

    def computed_tokens(self, request_id: str) -> int:
        """Tokens of the request that went through the model, generated ones but the last included."""
        return sum(step.get(request_id, 0) for step in self.steps)

    def metric(self, name: str, **labels: str) -> float:
        """One of vLLM's Prometheus metrics, summed over the labels not named; of a histogram its sum.

        Zero for a metric nothing was counted in: vLLM makes those of connectors when it first needs them.
        """
        found = [metric for metric in self.engine.get_metrics() if metric.name == f"vllm:{name}"]
        return sum(
            metric.sum if hasattr(metric, "sum") else metric.value
            for metric in found
            if labels.items() <= metric.labels.items()
        )

    def shutdown(self) -> None:
        """Stop connectors and the worker; engines with NIXL need it to end their threads."""
        self.engine.engine_core.shutdown()

    def _observe_schedule(self) -> None:
        schedule = self.scheduler.schedule

        def observed(*arguments: Any, **keywords: Any) -> Any:
            output = schedule(*arguments, **keywords)
            self.steps.append(dict(output.num_scheduled_tokens))
            return output

        self.scheduler.schedule = observed


def prompt(seed: int, length: int) -> list[int]:
    """Token ids of a prompt. Different seeds differ from their first token on; a longer prompt extends a shorter."""
    usable = MODEL.vocab_size - len(MODEL.special_tokens)
    return [len(MODEL.special_tokens) + (seed * 7919 + index * (2 * seed + 31)) % usable for index in range(length)]

"""The executor of an emulated engine: vLLM's own server, engine core and scheduler, no GPU.

vLLM takes it by `--distributed-executor-backend`. It stands where the workers are: a step takes as
long as the step-time model says and gives words instead of a model's answer. Everything above it is
real. What it computes is in `emulated_device`; it reads no weights and holds no KV cache.

Time: the device starts a step when the scheduler hands it over or when the step before it has
ended, whichever is later. With asynchronous scheduling the next step is already there, so the
scheduler's time is hidden behind the step, as on a GPU; with synchronous scheduling it comes on
top. The host's own gaps (preparing inputs, sampling) are those of this machine, not of a GPU host.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from vllm.v1.attention.backends.utils import record_kv_cache_layout
from vllm.v1.executor.abstract import Executor
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.outputs import (
    EMPTY_MODEL_RUNNER_OUTPUT,
    DraftTokenIds,
    LogprobsLists,
    ModelRunnerOutput,
)

from trimtab.engine_bridge.engine_spec import get_engine_spec
from trimtab.engine_bridge.vllm.emulated_device import (
    Answer,
    DeviceStream,
    StepWork,
    prompt_seed,
)
from trimtab.engine_bridge.vllm.emulated_model import ANSWER_TOKENS
from trimtab.engine_bridge.vllm.media import encoded_features, features_ms
from trimtab.engine_bridge.vllm.settings import PluginSettings

_LAYER = "emulated"
_LAYOUT = "LBHNC"
_HEAD_SIZE = 64
_IMPOSSIBLE = -100.0


@dataclass
class _Request:
    """What the device remembers of a request until the scheduler says that it is finished."""

    prompt_tokens: int
    answer: Answer
    logprobs: int | None
    """How many logprobs it wants beside that of the token itself; None: none at all."""
    mm_features: list[Any]
    """Its images and so on, as vLLM describes them; they are never looked at."""


@dataclass
class _Step:
    """A step between `execute_model` and `sample_tokens`."""

    end_s: float
    req_ids: list[str]
    requests: list[_Request]
    drafts: list[int | None]
    """Draft tokens that the step verifies, by request; None: its prompt goes on, no token."""


class _OnStream(Future[Any]):
    """A result that is there when the device gets to it; whoever asks early waits."""

    def __init__(self, stream: DeviceStream, end_s: float, value: Any) -> None:
        super().__init__()
        self._stream = stream
        self._end_s = end_s
        self._value = value

    def result(self, timeout: float | None = None) -> Any:
        self._stream.wait(self._end_s)
        return self._value

    def done(self) -> bool:
        return self._stream.ended(self._end_s)


class EmulatedExecutor(Executor):
    """One emulated engine, as large as the engine spec says, behind vLLM's executor interface."""

    uses_ray = False
    supports_pp = False

    @classmethod
    def supports_async_scheduling(cls) -> bool:
        """Yes: steps run beside the host. Without it vLLM turns asynchronous scheduling off."""
        return True

    def _init_executor(self) -> None:
        settings = PluginSettings.of(self.vllm_config.additional_config)
        spec = get_engine_spec(settings.engine)
        self._coef, self._encoder = spec.coef, spec.encoder
        self._kv_tokens = spec.kv_tokens
        self._s_per_ms = settings.time_scale * 1e-3
        self._stream = DeviceStream()
        self._requests: dict[str, _Request] = {}
        self._steps: deque[_Step] = deque()
        self._next_drafts: DraftTokenIds | None = None
        speculative = self.speculative_config
        self._draft_tokens = speculative.num_speculative_tokens if speculative else 0

    # At the start, in the order of the calls.

    def get_kv_cache_specs(self) -> list[dict[str, Any]]:
        """One layer stands for all: the scheduler counts blocks, whatever they hold."""
        return [{_LAYER: self._layer()}]

    def get_supported_kv_cache_layouts(self) -> list[list[str]]:
        """Any will do, as nothing is stored."""
        return [[_LAYOUT]]

    def set_kv_cache_layout(self, layout_name: str, *_: Any) -> None:
        """Note the layout; vLLM 0.33 passes the interleave of context parallelism too."""
        record_kv_cache_layout(self.cache_config, layout_name)

    def determine_available_memory(self) -> list[int]:
        """Bytes for exactly the engine's KV blocks."""
        return [self._kv_tokens // self.cache_config.block_size * self._layer().page_size_bytes]

    def initialize_from_config(self, kv_cache_configs: list[Any]) -> None:
        """Allocate nothing."""

    def compile_or_warm_up_model(self) -> None:
        """Compile the step-time model, which would otherwise delay the first step."""
        StepWork(tokens=1, sequences=1, decodes=1, kv_tokens=1).duration_ms(self._coef)

    @cached_property
    def supported_tasks(self) -> tuple[str, ...]:
        """Generation alone."""
        return ("generate",)

    # For each step.

    def execute_model(self, scheduler_output: Any, non_block: bool = False) -> Any:
        """Start a step on the device.

        Returns:
            None, or its future: as with a GPU the tokens are `sample_tokens`' to give. A step of
            no tokens has no `sample_tokens`, so it is answered here and takes no time.
        """
        for req_id in scheduler_output.finished_req_ids:
            self._requests.pop(req_id, None)
        if not scheduler_output.total_num_scheduled_tokens:
            return self._result(EMPTY_MODEL_RUNNER_OUTPUT, 0.0, non_block)
        self._steps.append(self._begin(scheduler_output))
        return self._result(None, 0.0, non_block)

    def sample_tokens(self, grammar_output: Any, non_block: bool = False) -> Any:
        """The tokens of the oldest step that still owes them.

        Returns:
            A `ModelRunnerOutput`, or its future, once the device has got there.
        """
        step = self._steps.popleft()
        allowed = _allowed_rows(grammar_output, step)
        tokens = [
            [] if drafts is None else self._sample(request, drafts, allowed.get(req_id))
            for req_id, request, drafts in zip(
                step.req_ids, step.requests, step.drafts, strict=True
            )
        ]
        self._propose(step)
        output = ModelRunnerOutput(
            req_ids=step.req_ids,
            req_id_to_index={req_id: row for row, req_id in enumerate(step.req_ids)},
            sampled_token_ids=tokens,
            logprobs=_logprobs(step.requests, tokens),
        )
        return self._result(output, step.end_s, non_block)

    def take_draft_token_ids(self) -> DraftTokenIds | None:
        """The drafts for the step after the last one sampled."""
        drafts, self._next_drafts = self._next_drafts, None
        return drafts

    # At any time.

    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        non_block: bool = False,
    ) -> Any:
        """Answer None to whatever else vLLM asks its one worker."""
        return self._result([None], 0.0, non_block)

    def check_health(self) -> None:
        """Nothing can break."""

    def shutdown(self) -> None:
        """Nothing is held."""

    def _layer(self) -> FullAttentionSpec:
        return FullAttentionSpec(
            block_size=self.cache_config.block_size,
            num_kv_heads=1,
            head_size=_HEAD_SIZE,
            dtype=self.model_config.dtype,
        )

    def _result(self, value: Any, end_s: float, non_block: bool) -> Any:
        future = _OnStream(self._stream, end_s, value)
        return future if non_block else future.result()

    def _begin(self, scheduler_output: Any) -> _Step:
        scheduled = scheduler_output.num_scheduled_tokens
        drafted = scheduler_output.scheduled_spec_decode_tokens
        work = StepWork()
        step = _Step(end_s=0.0, req_ids=[], requests=[], drafts=[])

        def add(req_id: str, computed: int, known: int) -> None:
            request, count = self._requests[req_id], scheduled[req_id]
            drafts = len(drafted.get(req_id, ()))
            work.add(computed=computed, scheduled=count, drafts=drafts)
            step.req_ids.append(req_id)
            step.requests.append(request)
            step.drafts.append(drafts if computed + count >= known else None)

        for new in scheduler_output.scheduled_new_reqs:
            add(new.req_id, new.num_computed_tokens, self._admit(new))
        cached = scheduler_output.scheduled_cached_reqs
        for req_id, computed, given in zip(
            cached.req_ids, cached.num_computed_tokens, cached.num_output_tokens, strict=True
        ):
            request = self._requests[req_id]
            if req_id in cached.resumed_req_ids:
                # What was under way when it was preempted may have been thrown away.
                request.answer.given = given
            # `given` holds the places of tokens that are still under way.
            add(req_id, computed, request.prompt_tokens + given)
        encoded = encoded_features(scheduler_output.scheduled_encoder_inputs, self._requests)
        step_ms = work.duration_ms(self._coef) + features_ms(self._encoder, encoded)
        step.end_s = self._stream.submit(step_ms * self._s_per_ms)
        return step

    def _admit(self, new: Any) -> int:
        """Remember a new request; how many tokens must be computed before it gives one."""
        prompt = new.prompt_token_ids
        seed = prompt_seed(prompt) if prompt else prompt_seed(new.req_id.encode())
        # Model runner V2 sends a preempted request anew, with its answer so far.
        known = len(new.prefill_token_ids) if new.prefill_token_ids else new.prompt_len
        params = new.sampling_params
        self._requests[new.req_id] = _Request(
            prompt_tokens=new.prompt_len,
            answer=Answer(seed, given=known - new.prompt_len),
            logprobs=params.logprobs if params is not None else None,
            mm_features=new.mm_features,
        )
        return known

    def _sample(self, request: _Request, drafts: int, allowed: Any) -> list[int]:
        if allowed is None:
            return request.answer.take(ANSWER_TOKENS, drafts=drafts)
        ids = np.flatnonzero(np.unpackbits(allowed.view(np.uint8), bitorder="little"))
        return [int(ids[place]) for place in request.answer.take(range(len(ids)))]

    def _propose(self, step: _Step) -> None:
        if not self._draft_tokens:
            return
        rows = [row for row, drafts in enumerate(step.drafts) if drafts is not None]
        self._next_drafts = DraftTokenIds(
            [step.req_ids[row] for row in rows],
            [step.requests[row].answer.peek(ANSWER_TOKENS, self._draft_tokens) for row in rows],
        )


def _allowed_rows(grammar_output: Any, step: _Step) -> dict[str, Any]:
    """Bits of the tokens that each request's grammar allows next; drafts' rows are passed over."""
    if grammar_output is None:
        return {}
    drafts = dict(zip(step.req_ids, step.drafts, strict=True))
    rows, at = {}, 0
    for req_id in grammar_output.structured_output_request_ids:
        rows[req_id] = grammar_output.grammar_bitmask[at]
        at += 1 + (drafts.get(req_id) or 0)
    return rows


def _logprobs(requests: list[_Request], tokens: list[list[int]]) -> LogprobsLists | None:
    """Certainty: the token has probability 1, and the first ids of the vocabulary next to none."""
    wanted = [request.logprobs for request in requests if request.logprobs is not None]
    if not wanted:
        return None
    flat = [token for row in tokens for token in row]
    ids = np.tile(np.arange(1 + max(0, *wanted)), (len(flat), 1))
    ids[:, 0] = flat
    values = np.full(ids.shape, _IMPOSSIBLE)
    values[:, 0] = 0.0
    starts = np.cumsum([0, *map(len, tokens)])[:-1].tolist()
    return LogprobsLists(ids, values, np.ones(len(flat), np.int64), starts)

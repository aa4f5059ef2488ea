"""A development tool: drives a real vLLM V1 scheduler in virtual time, without a model or a server.

It tells whether the replay decides as vLLM does: same arrivals, same step-time model, and every
step's map of requests to scheduled tokens side by side (`benchmarks/parity.py`). It is no engine to
serve with, and nothing else of the package imports it.
"""

from __future__ import annotations

import heapq
import json
import os
from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

os.environ.setdefault("VLLM_TARGET_DEVICE", "cpu")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, DraftTokenIds, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from trimtab.engine_bridge.engine_spec import EngineSpec
from trimtab.engine_bridge.plan import Plan
from trimtab.engine_bridge.replay.build import draft_acceptance
from trimtab.engine_bridge.replay.drafted_step import accepted_drafts
from trimtab.engine_bridge.replay.slices import first_alike
from trimtab.engine_bridge.rules.speculation import drafting_ms
from trimtab.engine_bridge.step_time import (
    decode_attention_ms,
    linear_ms,
    mixed_attention_ms,
    prefill_attention_ms,
)
from trimtab.engine_bridge.trace import NO_SESSION, NO_SLICE, Trace
from trimtab.engine_bridge.vllm.media import encoded_features, features_ms
from trimtab.engine_bridge.vllm.virtual_config import kv_cache_config, vllm_config
from trimtab.engine_bridge.vllm.virtual_media import features_of, give_encoder

_ARRIVAL, _CANCEL = 0, 2
"""Kinds of timers; numbered as the replay's events."""
_PRIVATE = 1 << 32
"""Token ids from here on belong to one request only; below it they come from prefix ids."""
_NO_STOP = -1
_PADDING = -1
"""vLLM's placeholder for a draft that is none."""

StockScheduler = AsyncScheduler
"""What vLLM runs by default on a GPU."""
Prepare = Callable[[Scheduler, Callable[[], float]], None]


class VirtualClock:
    """The virtual time as `clock.Clock`; steps take exactly what the model says."""

    def __init__(self, now: Callable[[], float]) -> None:
        """Read the time from `now`, in seconds."""
        self._now = now

    def now_s(self) -> float:
        """Virtual seconds."""
        return self._now()

    def arrived_s(self, arrival_time: float) -> float:
        """Arrivals are virtual already."""
        return arrival_time

    def speed(self, model_ms: float, start_s: float, end_s: float) -> float:
        """As the model says; a quotient of differences would be a rounding error away from it."""
        return 1.0


class Step(NamedTuple):
    """What one step carried."""

    start_s: float
    """Virtual time at which it was planned."""
    end_s: float
    tokens: dict[int, int]
    """Scheduled tokens by row of the trace."""


class VirtualVllm:
    """One real scheduler with its real KV cache manager, stepped through a trace.

    A step is planned, takes as long as the step-time model says, and gives one token to each
    request whose prompt is computed, before the next one is planned.
    """

    def __init__(
        self,
        trace: Trace,
        plan: Plan,
        spec: EngineSpec,
        *,
        scheduler_class: type[Scheduler] = Scheduler,
        policy: str = "fcfs",
        speed: float = 1.0,
        additional_config: Mapping[str, Any] | None = None,
        prepare: Prepare | None = None,
        draft_tokens: int = 0,
        accepts: Callable[[int, int], bool] | None = None,
    ) -> None:
        """Set the scheduler up before the first arrival.

        Args:
            trace: The traffic; its tiers must be the plan's.
            plan: Tells tiers' order (under `priority`) and the limits that win over the engine's.
            spec: The engine's facts.
            scheduler_class: vLLM's scheduler, or one made from it.
            policy: vLLM's `fcfs` or `priority`.
            speed: True step time over the model's.
            additional_config: vLLM's field of that name, for schedulers that read it.
            prepare: Called with the new scheduler and the virtual clock, before anything arrives.
            draft_tokens: Drafts that are proposed for each decode's next step; 0: no speculation,
                unless the engine's facts have a draft model: then it drafts as the replay's does.
            accepts: Whether a row's draft for a position of its sequence is right; None: none is,
                or the draft model's facts tell.
        """
        self._trace, self._spec, self._coef, self._speed = trace, spec, spec.coef, speed
        self._tier = [plan.tier_index(trace.tier_names[t]) for t in trace.tier]
        self.now_s = 0.0
        self.steps = self.encoded_items = 0
        self._timers: list[tuple[float, int, int]] = []
        self._later, self._successor = _sessions(trace)
        self._alike = first_alike(trace).tolist()
        self._read: set[int] = set()
        self._open = [row for row in range(len(trace)) if row not in self._later]
        self._next_open = 0
        self._token_since: dict[str, int] = {}
        self._draft_tokens, self._accepts = draft_tokens, accepts
        self._draft = spec.draft
        if spec.draft is not None:
            self._draft_tokens = spec.draft.tokens
            self._acceptance = draft_acceptance(trace, spec)
        self.left = len(trace)
        self._hasher = None
        if spec.enable_prefix_caching:
            init_none_hash(sha256)
            self._hasher = get_request_block_hasher(spec.block_size, sha256)
        config = vllm_config(
            spec.block_size,
            plan.engine.max_num_seqs or spec.max_num_seqs,
            plan.engine.max_num_batched_tokens or spec.max_num_batched_tokens,
            spec.num_gpu_blocks,
            spec.enable_prefix_caching,
            policy,
            json.dumps(dict(additional_config or {})),
            self._draft_tokens,
        )
        self.scheduler = scheduler_class(
            vllm_config=config,
            kv_cache_config=kv_cache_config(spec),
            structured_output_manager=StructuredOutputManager(config),
            block_size=spec.block_size,
            log_stats=False,
        )
        give_encoder(self.scheduler, spec.encoder, trace)
        if prepare is not None:
            prepare(self.scheduler, lambda: self.now_s)

    @property
    def waiting(self) -> list[int]:
        """Rows that wait, in queue order."""
        return [int(r.request_id) for r in self.scheduler.waiting]

    @property
    def running(self) -> list[int]:
        """Rows in the batch, in vLLM's order."""
        return [int(r.request_id) for r in self.scheduler.running]

    def cached_blocks(self) -> int:
        """Free blocks that still hold content that can be found."""
        free = self.scheduler.kv_cache_manager.block_pool.free_block_queue.get_all_free_blocks()
        return sum(block.block_hash is not None for block in free)

    def free_blocks(self) -> int:
        """Blocks that no running request holds."""
        return int(self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks())

    def step(self) -> Step | None:
        """Run the next step that carries anything; None when no request is left."""
        while self.left > 0:
            self._deliver()
            if self.left == 0:
                break
            if self.scheduler.running or len(self.scheduler.waiting):
                done = self._step()
                if done is not None:
                    return done
            self.now_s = self._next_event_s()
            if self.now_s == np.inf:
                raise RuntimeError("requests wait that nothing will ever admit")
        return None

    def cancel(self, row: int) -> None:
        """The client of that row has gone."""
        if _name(row) in self.scheduler.requests:
            self.scheduler.finish_requests(_name(row), RequestStatus.FINISHED_ABORTED)
            self._ended(row)

    def _next_event_s(self) -> float:
        return min(self._next_due_s(), self._next_of_scheduler_s())

    def _next_of_scheduler_s(self) -> float:
        """When the scheduler itself has something to do (back-off, shedding); stock has not."""
        ask = getattr(self.scheduler, "next_event_s", None)
        return np.inf if ask is None else float(ask())

    def _next_due_s(self) -> float:
        at = self._timers[0][0] if self._timers else np.inf
        if self._next_open < len(self._open):
            at = min(at, float(self._trace.arrival_s[self._open[self._next_open]]))
        return at

    def _deliver(self) -> None:
        """Arrivals and cancellations that are due, in the order of their times."""
        while self._next_due_s() <= self.now_s:
            timer = self._timers[0][0] if self._timers else np.inf
            if self._next_open < len(self._open):
                row = self._open[self._next_open]
                arrival = float(self._trace.arrival_s[row])
                if arrival <= timer:
                    self._next_open += 1
                    self._arrive(self._unread(row), arrival)
                    continue
            at_s, row, kind = heapq.heappop(self._timers)
            if kind == _ARRIVAL:
                self._arrive(self._unread(row), at_s)
            else:
                self.cancel(row)

    def _arrive(self, row: int, at_s: float) -> None:
        trace, spec = self._trace, self._spec
        prompt, output = int(trace.prompt_tokens[row]), int(trace.output_tokens[row])
        if prompt + output > (spec.num_gpu_blocks - 1) * spec.block_size:
            self._ended(row)
            return
        if np.isfinite(trace.cancel_after_s[row]):
            cancel_s = at_s + float(trace.cancel_after_s[row])
            heapq.heappush(self._timers, (cancel_s, row, _CANCEL))
        labels = {
            "trimtab_tenant": trace.tenant_names[trace.tenant[row]],
            "trimtab_tier": trace.tier_names[trace.tier[row]],
        }
        if self._alike[row] != NO_SLICE:
            labels["trimtab_slice"] = "1"
        self.scheduler.add_request(
            Request(
                request_id=_name(row),
                prompt_token_ids=self._content(row, 0, prompt),
                sampling_params=SamplingParams(
                    max_tokens=output, ignore_eos=True, extra_args=labels
                ),
                pooling_params=None,
                mm_features=features_of(trace, row),
                arrival_time=at_s,
                priority=self._tier[row],
                block_hasher=self._hasher,
            )
        )

    def _unread(self, row: int) -> int:
        """The row to begin with of a request that arrives, as `replay.slices.unread`.

        Nothing that was read is ever believed to be gone.
        """
        if row and self._alike[row - 1] != NO_SLICE:
            return row
        return self._pass_over(row, lambda row: self._alike[row] in self._read)

    def _pass_over(self, row: int, unwanted: Callable[[int], bool]) -> int:
        """The first row from this one on that is wanted; the ones before it never arrive."""
        while unwanted(row):
            self.left -= 1
            row = self._successor[row]
        return row

    def _content(self, row: int, first: int, count: int) -> list[int]:
        """Token ids of a row's positions: equal where the trace's prefix ids say so."""
        trace = self._trace
        if trace.slice_of is not None and trace.slice_of[row] != NO_SLICE:
            row = int(trace.slice_of[row])
        start, end = trace.prefix_offsets[row], trace.prefix_offsets[row + 1]
        size = max(1, int(trace.prefix_block_tokens[row]))
        places = np.arange(first, first + count) // size
        tokens = np.full(count, _PRIVATE + row, np.int64)
        named = places < end - start
        tokens[named] = trace.prefix_ids[start + places[named]]
        return list(map(int, tokens))

    def _step(self) -> Step | None:
        start_s = self.now_s
        output = self.scheduler.schedule()
        self._note_given_up()
        if not output.num_scheduled_tokens:
            self.scheduler.update_from_output(output, EMPTY_MODEL_RUNNER_OUTPUT)
            return None
        step_ms = self._model_ms(output.num_scheduled_tokens)
        if output.scheduled_encoder_inputs:
            step_ms += self._encode_ms(output.scheduled_encoder_inputs)
        self.now_s += step_ms * 1e-3
        rows = {int(name): tokens for name, tokens in output.num_scheduled_tokens.items()}
        names = list(output.num_scheduled_tokens)
        drafts = output.scheduled_spec_decode_tokens
        # What pads the last token of a prompt is no draft.
        sampled = [
            self._sample(name, sum(t != _PADDING for t in drafts.get(name, ()))) for name in names
        ]
        self.scheduler.update_from_output(
            output,
            ModelRunnerOutput(
                req_ids=names,
                req_id_to_index={name: at for at, name in enumerate(names)},
                sampled_token_ids=sampled,
            ),
        )
        for name in names:
            if name not in self.scheduler.requests:
                self._ended(int(name))
        if self._draft_tokens:
            drafted = [
                name
                for name, tokens in zip(names, sampled, strict=True)
                if tokens and self._drafts_for(int(name))
            ]
            proposed = [[0] * self._draft_tokens for _ in drafted]
            self.scheduler.update_draft_token_ids(DraftTokenIds(drafted, proposed))
        self.steps += 1
        return Step(start_s, self.now_s, rows)

    def _note_given_up(self) -> None:
        """Requests that the scheduler itself has ended."""
        for name in list(getattr(self.scheduler, "given_up", ())):
            self._ended(int(name))

    def _sample(self, name: str, drafts: int) -> list[int]:
        """The next tokens of a request whose prompt is computed: accepted drafts and one more."""
        request = self.scheduler.requests[name]
        if request.num_computed_tokens < request.num_tokens:
            return []
        self._token_since[name] = request.num_preemptions
        row, first, accepted = int(name), request.num_tokens, 0
        if self._draft is not None and drafts:
            accepted = int(
                accepted_drafts(row, first, drafts, self._acceptance[row], self._draft.kept)
            )
        elif self._accepts is not None:
            while accepted < drafts and self._accepts(row, first + accepted):
                accepted += 1
        return self._content(row, first, 1 + accepted)

    def _drafts_for(self, row: int) -> bool:
        """Whether anything is known of how its drafts fare."""
        return self._draft is None or not np.isnan(self._acceptance[row])

    def _model_ms(self, scheduled: Mapping[str, int]) -> float:
        """The step's time, in the replay's order of additions."""
        decodes, drafts, longest, chunks, chunk_tokens, read, pairs = 0, 0, 0, 0, 0, 0, 0.0
        for name, tokens in scheduled.items():
            request = self.scheduler.requests[name]
            before = request.num_computed_tokens - tokens
            # Who comes back after a preemption computes its tokens as a prompt.
            if self._token_since.get(name) == request.num_preemptions:
                decodes += 1
                drafts += tokens - 1
                longest = max(longest, tokens - 1)
                read += before
            else:
                chunks += 1
                chunk_tokens += tokens
                pairs += tokens * (before + 0.5 * tokens)
        linear = (
            linear_ms(self._coef, float(chunk_tokens + decodes + drafts), float(decodes + chunks))
            * self._speed
        )
        attention = (
            prefill_attention_ms(self._coef, float(chunks), float(chunk_tokens), pairs)
            * self._speed
            if chunks
            else 0.0
        )
        reading = decode_attention_ms(self._coef, float(decodes), float(read))
        reading += mixed_attention_ms(self._coef, float(chunk_tokens), float(decodes), float(read))
        reading *= self._speed
        if self._draft is None or not drafts:
            return linear + attention + reading
        draft = self._draft
        made = drafting_ms(draft.us_per_token, draft.pass_ms, float(drafts), float(longest))
        return linear + attention + reading + made * self._speed

    def _encode_ms(self, scheduled: Mapping[str, list[int]]) -> float:
        """What the media that the step encodes add to its time."""
        features = encoded_features(scheduled, self.scheduler.requests)
        self.encoded_items += len(features)
        return features_ms(self._spec.encoder, features) * self._speed

    def _ended(self, row: int) -> None:
        self.left -= 1
        answered = self._token_since.pop(_name(row), None) is not None
        later = self._successor.get(row)
        if self._alike[row] != NO_SLICE and answered:
            self._read.add(self._alike[row])
        elif self._alike[row] != NO_SLICE:
            later = self._pass_over(self._successor[row], lambda row: self._alike[row] != NO_SLICE)
        if later is not None:
            at_s = self.now_s + float(self._trace.think_s[later])
            heapq.heappush(self._timers, (at_s, later, _ARRIVAL))


def _name(row: int) -> str:
    """Request ids that sort like rows: vLLM's priority queue breaks ties by them."""
    return f"{row:09d}"


def _sessions(trace: Trace) -> tuple[set[int], dict[int, int]]:
    """Rows that wait for an earlier turn, and each turn's successor."""
    later: set[int] = set()
    successor: dict[int, int] = {}
    rows = np.flatnonzero(trace.session != NO_SESSION)
    order = rows[np.lexsort((trace.turn[rows], trace.session[rows]))]
    for before, after in pairwise(order):
        if trace.session[before] == trace.session[after]:
            successor[int(before)] = int(after)
            later.add(int(after))
    return later, successor

"""One FairScheduler stepped as vLLM's engine core steps it, with the books checked at every turn.

Virtual time, no model: a request's n-th token is a function of its name and n, so a token that is
lost, doubled or out of place shows. `asynchronous` is the order of `step_with_batch_queue`: step
n + 1 is scheduled before the output of step n is taken in.
"""

from __future__ import annotations

import json
import os
import zlib
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest

os.environ.setdefault("VLLM_TARGET_DEVICE", "cpu")

from vllm.multimodal.inputs import MultiModalFeatureSpec
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.encoder_cache_manager import EncoderCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from trimtab.engine_bridge.engine_spec import EngineSpec
from trimtab.engine_bridge.vllm import virtual_config, virtual_time
from trimtab.engine_bridge.vllm.scheduler import FairScheduler

VOCABULARY = 30_000


def token_of(name: str, place: int) -> int:
    """The token that a request gets at a place of its answer."""
    return zlib.crc32(f"{name}/{place}".encode()) % VOCABULARY


class Asked(NamedTuple):
    """A request as its client remembers it."""

    request: Request
    output_tokens: int


class _Flying(NamedTuple):
    scheduled: Any
    tokens: dict[str, list[int]]
    end_s: float


class Driven:
    """A scheduler, its requests, and what has come back of them."""

    def __init__(
        self,
        spec: EngineSpec,
        *,
        asynchronous: bool,
        settings: Mapping[str, Any] | None = None,
        step_s: float = 0.01,
        encoder: tuple[int, int] | None = None,
    ) -> None:
        """Before the first request; `encoder` is the budget and the cache of media, in tokens."""
        order = "async" if asynchronous else "sync"
        config = virtual_config.vllm_config(
            spec.block_size,
            spec.max_num_seqs,
            spec.max_num_batched_tokens,
            spec.num_gpu_blocks,
            spec.enable_prefix_caching,
            "priority",
            json.dumps(
                {
                    "trimtab": {"engine": spec.name, "interval_s": 0.2, **(settings or {})},
                    "order": order,
                }
            ),
            0,
        )
        config.scheduler_config.async_scheduling = asynchronous
        self._hasher: Any = None
        if spec.enable_prefix_caching:
            init_none_hash(sha256)
            self._hasher = get_request_block_hasher(spec.block_size, sha256)
        self.now_s = 0.0
        self.scheduler = FairScheduler(
            vllm_config=config,
            kv_cache_config=virtual_config.kv_cache_config(spec),
            structured_output_manager=StructuredOutputManager(config),
            block_size=spec.block_size,
            log_stats=False,
        )
        self.scheduler.use_clock(virtual_time.VirtualClock(lambda: self.now_s))
        self.cache_tokens = 0
        if encoder is not None:
            self.scheduler.max_num_encoder_input_tokens, self.cache_tokens = encoder
            self.scheduler.encoder_cache_manager = EncoderCacheManager(self.cache_tokens)
        self.pool = self.scheduler.kv_cache_manager.block_pool
        self.free_at_start = self.pool.get_num_free_blocks()
        self.asked: dict[str, Asked] = {}
        self.got: dict[str, list[int]] = {}
        self.ended: Counter[str] = Counter()
        self.aborted: set[str] = set()
        self.shed: set[str] = set()
        self.steps = self.preemptions = self.encoded = 0
        self.in_flight: Callable[[], None] = lambda: None
        """Called when a step is on the device and its output is about to be taken in."""
        self._step_s = step_s
        self._depth = 2 if asynchronous else 1
        self._flying: deque[_Flying] = deque()

    def ask(
        self,
        name: str,
        prompt: list[int],
        output_tokens: int,
        tier: str,
        tenant: str,
        media: Sequence[MultiModalFeatureSpec] = (),
    ) -> None:
        """A request arrives."""
        request = Request(
            request_id=name,
            prompt_token_ids=prompt,
            sampling_params=SamplingParams(
                max_tokens=output_tokens,
                ignore_eos=True,
                extra_args={"trimtab_tier": tier, "trimtab_tenant": tenant},
            ),
            pooling_params=None,
            mm_features=list(media),
            arrival_time=self.now_s,
            block_hasher=self._hasher,
        )
        self.asked[name] = Asked(request, output_tokens)
        self.got[name] = []
        self.scheduler.add_request(request)

    def abort(self, name: str) -> None:
        """A client has gone; to abort who has ended is allowed, as in a server."""
        if self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED):
            self.aborted.add(name)
            self.ended[name] += 1

    @property
    def open_names(self) -> list[str]:
        """Requests that have not ended."""
        return [name for name in self.asked if not self.ended[name]]

    def busy(self) -> bool:
        """Whether the engine core would go on."""
        return bool(self._flying) or bool(self.scheduler.has_requests())

    def turn(self) -> None:
        """One turn of the engine core's loop."""
        if self.scheduler.has_requests():
            scheduled = self.scheduler.schedule()
            self.check()
            self.preemptions += len(scheduled.preempted_req_ids or ())
            tokens = self._sample(scheduled)
            start_s = self._flying[-1].end_s if self._flying else self.now_s
            took_s = self._step_s if scheduled.num_scheduled_tokens else 0.0
            self._flying.append(_Flying(scheduled, tokens, max(start_s, self.now_s) + took_s))
            if scheduled.num_scheduled_tokens:
                self.steps += 1
                if len(self._flying) < self._depth:
                    return
            else:
                self._check_idle()
        if self._flying:
            self._take_in(self._flying.popleft())

    def _sample(self, scheduled: Any) -> dict[str, list[int]]:
        """Each request's tokens of a step, by what the scheduler tells the workers."""
        known: dict[str, tuple[int, int]] = {}
        for new in scheduled.scheduled_new_reqs:
            known[new.req_id] = (new.num_computed_tokens, 0)
        cached = scheduled.scheduled_cached_reqs
        for name, computed, given in zip(
            cached.req_ids, cached.num_computed_tokens, cached.num_output_tokens, strict=True
        ):
            known[name] = (computed, given)
        tokens = {}
        for name, count in scheduled.num_scheduled_tokens.items():
            computed, given = known[name]
            whole = self.asked[name].request.num_prompt_tokens + given
            ends = computed + count >= whole
            tokens[name] = [token_of(name, given)] if ends else []
            self._check_encoded(name, computed, count, scheduled.scheduled_encoder_inputs)
        return tokens

    def _check_encoded(
        self, name: str, computed: int, count: int, encoding: Mapping[str, list[int]]
    ) -> None:
        """The media of a chunk are encoded by now, and none that lies behind it is in this step."""
        self.encoded += len(encoding.get(name, ()))
        for at, feature in enumerate(self.asked[name].request.mm_features):
            first = feature.mm_position.offset
            if first < computed + count and first + feature.mm_position.length > computed:
                assert feature.identifier in self.scheduler.encoder_cache_manager.cached
            elif at in encoding.get(name, ()):
                pytest.fail(f"{name} has an item encoded that its chunk does not show")

    def _take_in(self, step: _Flying) -> None:
        self.now_s = max(self.now_s, step.end_s)
        self.in_flight()
        self.shed |= set(self.scheduler.given_up)
        names = list(step.tokens)
        output = EMPTY_MODEL_RUNNER_OUTPUT
        if names:
            output = ModelRunnerOutput(
                req_ids=names,
                req_id_to_index={name: at for at, name in enumerate(names)},
                sampled_token_ids=[step.tokens[name] for name in names],
            )
        for answers in self.scheduler.update_from_output(step.scheduled, output).values():
            for answer in answers.outputs:
                self.got[answer.request_id] += answer.new_token_ids
                if answer.finish_reason is not None:
                    self.ended[answer.request_id] += 1
        self.check()

    def _check_idle(self) -> None:
        """A step of nothing, and nothing under way: everybody who waits must have to."""
        if len(self._flying) > 1:
            return
        if not self.scheduler.running and len(self.scheduler.waiting):
            due_s = self.scheduler.next_event_s()
            assert np.isfinite(due_s), "requests wait that nothing will ever admit"
            assert due_s > self.now_s, "an idle step while somebody could have joined"
            self.now_s = due_s

    def check(self) -> None:
        """What must hold between any two calls of vLLM."""
        scheduler, blocks = self.scheduler, self.scheduler._blocks
        engine = scheduler.ledger._state.engine[0]
        assert engine.running == len(scheduler.running)
        assert engine.waiting == len(scheduler.waiting)
        assert len(scheduler.running) + len(scheduler.waiting) == len(scheduler.requests)
        assert blocks.num_free_blocks + sum(blocks.held) == self.free_at_start
        assert min(blocks.held) >= 0
        holders: dict[int, set[int]] = {}
        refs: Counter[int] = Counter()
        for request in scheduler.running:
            for block in scheduler.kv_cache_manager.get_blocks(request.request_id).blocks[0]:
                refs[block.block_id] += 1
                holders.setdefault(block.block_id, set()).add(request.trimtab_pool)
        held = [0] * len(blocks.held)
        for number, pools in holders.items():
            assert self.pool.blocks[number].ref_cnt == refs[number]
            assert blocks._charge[number] in pools
            held[blocks._charge[number]] += 1
        assert held == blocks.held
        kept = sum(1 for block in self.pool.blocks if block.ref_cnt > 0 and not block.is_null)
        assert kept == len(holders)

    def check_over(self) -> None:
        """All requests have ended once, with the right tokens, and no block is kept."""
        assert not self.scheduler.requests
        free = self.pool.free_block_queue.get_all_free_blocks()
        assert len(free) == len({block.block_id for block in free}) == self.free_at_start
        assert not self.scheduler._blocks._foreign
        assert not self.scheduler.ledger._row_of
        assert self.scheduler.encoder_cache_manager.num_freeable_slots == self.cache_tokens
        assert not self.scheduler._media._items
        assert not self.scheduler._media._number
        assert set(self.ended) == set(self.asked)
        assert set(self.ended.values()) <= {1}
        for name, asked in self.asked.items():
            got = self.got[name]
            assert got == [token_of(name, place) for place in range(len(got))]
            if name not in self.aborted | self.shed:
                assert len(got) == asked.output_tokens
            else:
                assert len(got) <= asked.output_tokens

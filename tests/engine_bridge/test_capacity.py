"""Cost of requests and offered load: conservation, caching, sessions."""

from __future__ import annotations

import math
import time
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trimtab.engine_bridge.capacity import (
    offered_load,
    request_cost_ms,
    saturated_step,
)
from trimtab.engine_bridge.engine_spec import engine_names, get_engine_spec
from trimtab.engine_bridge.media import MediaItems
from trimtab.engine_bridge.trace import Trace

TP8 = get_engine_spec("h100:llama-3.1-70b-tp8")
LENGTHS = st.lists(
    st.tuples(st.integers(1, 30_000), st.integers(0, 30_000), st.integers(1, 4_000)),
    min_size=1,
    max_size=30,
)


def _open_trace(rng: np.random.Generator, n: int, seconds: float) -> Trace:
    return Trace.build(
        arrival_s=np.sort(rng.uniform(0, seconds, n)),
        prompt_tokens=rng.integers(200, 2_000, n),
        output_tokens=rng.integers(20, 400, n),
    )


@given(st.sampled_from(engine_names()), LENGTHS)
def test_costs_add_up_to_the_steps_that_serve_the_requests(
    name: str, lengths: list[tuple[int, int, int]]
) -> None:
    spec = get_engine_spec(name)
    uncached, cached, output = np.array(lengths, np.int64).T
    cost_ms = request_cost_ms(spec, uncached, uncached + cached, output)
    assert np.all(np.isfinite(cost_ms))
    assert np.all(cost_ms > 0)
    step = saturated_step(spec, uncached, uncached + cached, output)
    assert step.batch <= spec.max_num_seqs
    if step.batch:
        steps = float((output - 1).mean()) / step.batch
        assert cost_ms.mean() == pytest.approx(step.step_ms * steps, rel=1e-6)


def test_a_longer_request_costs_more_in_the_same_company() -> None:
    uncached = np.array([500, 1000, 500, 500])
    prompt = np.array([1000, 1000, 1000, 2000])
    output = np.array([100, 100, 200, 100])
    cost_ms = request_cost_ms(TP8, uncached, prompt, output)
    assert cost_ms[0] < min(cost_ms[1:])


def test_no_requests_cost_nothing() -> None:
    empty = np.zeros(0)
    assert len(request_cost_ms(TP8, empty, empty, empty)) == 0
    assert offered_load(_open_trace(np.random.default_rng(0), 0, 1.0), TP8) == 0.0


def test_smaller_limits_make_requests_dearer() -> None:
    prompt, output = np.full(10, 2_000), np.full(10, 300)
    cost_ms = request_cost_ms(TP8, prompt, prompt, output).mean()
    for limits in ({"max_num_seqs": 8}, {"num_gpu_blocks": 2_000}, {"max_num_batched_tokens": 64}):
        assert request_cost_ms(TP8.with_limits(**limits), prompt, prompt, output).mean() > cost_ms


def test_decode_bound_work_matches_a_count_by_hand() -> None:
    spec = TP8.with_limits(max_num_seqs=64)
    prompt, output = np.full(4, 1), np.full(4, 2_001)
    step = saturated_step(spec, prompt, prompt, output)
    assert step.batch == 64
    # Kernel tables: 64 sequences take 12.1 ms at 512 tokens, 13.7 ms at 2,048.
    assert 12.0 < step.step_ms < 13.8


def test_load_is_inverse_to_the_time_scale() -> None:
    rng = np.random.default_rng(1)
    trace = _open_trace(rng, 500, 100.0)
    slower = Trace.build(
        arrival_s=trace.arrival_s * 2,
        prompt_tokens=trace.prompt_tokens,
        output_tokens=trace.output_tokens,
    )
    assert offered_load(trace, TP8) == pytest.approx(2 * offered_load(slower, TP8))


def test_all_at_once_is_infinite_load() -> None:
    trace = Trace.build(arrival_s=[0.0, 0.0], prompt_tokens=100, output_tokens=10)
    assert math.isinf(offered_load(trace, TP8))


def test_an_engine_without_prefix_caching_is_loaded_more() -> None:
    n = 20
    trace = Trace.build(
        arrival_s=np.arange(n, dtype=np.float64),
        prompt_tokens=1600,
        output_tokens=np.full(n, 10),
        prefix_offsets=np.arange(n + 1, dtype=np.int64) * 100,
        prefix_ids=np.tile(np.arange(100, dtype=np.int32), n),
        prefix_block_tokens=np.full(n, 16, np.int32),
    )
    assert offered_load(trace, TP8) < 0.5 * offered_load(
        trace, TP8.with_limits(enable_prefix_caching=False)
    )


def test_encoding_is_part_of_the_load_where_it_is_not_cached() -> None:
    spec = get_engine_spec("h100:qwen2.5-vl-7b-tp1")
    assert spec.encoder is not None
    n = 100
    media = MediaItems.one_image_each(np.full(n, 1024, np.int32))
    trace = Trace.build(
        arrival_s=np.arange(n, dtype=np.float64),
        prompt_tokens=1600,
        output_tokens=np.full(n, 10),
    )
    shown = replace(trace, media=media)
    more = offered_load(shown, spec) - offered_load(trace, spec)
    assert more == pytest.approx(n * spec.encoder.item_ms(0, 1024) / ((n - 1) * 1000.0))
    assert offered_load(shown, TP8) == offered_load(trace, TP8)
    # All after the first repeat the first one's prompt, with the image in it.
    repeated = replace(
        shown,
        prefix_offsets=np.arange(n + 1, dtype=np.int64) * 100,
        prefix_ids=np.tile(np.arange(100, dtype=np.int32), n),
        prefix_block_tokens=np.full(n, 16, np.int32),
    )
    without = replace(repeated, media=MediaItems.none(n))
    once = offered_load(repeated, spec) - offered_load(without, spec)
    assert once == pytest.approx(more / n)


def test_pauses_of_sessions_stretch_the_load() -> None:
    turns = 20

    def session(think_s: float) -> Trace:
        return Trace.build(
            arrival_s=np.zeros(turns),
            prompt_tokens=1000,
            output_tokens=100,
            session=np.zeros(turns, np.int32),
            turn=np.arange(turns, dtype=np.int32),
            think_s=np.full(turns, think_s),
        )

    quick, slow = offered_load(session(0.0), TP8), offered_load(session(30.0), TP8)
    assert 0 < slow < quick < 1
    # A turn of 100 tokens takes 1.3 s alone and 10 s in a full batch.
    cost_s = request_cost_ms(TP8, [1000], [1000], [100])[0] / 1000
    assert cost_s / (30.0 + 10.0) < slow < cost_s / (30.0 + 1.3)


def test_a_million_rows_take_seconds() -> None:
    rng = np.random.default_rng(2)
    n = 1_000_000
    trace = Trace.build(
        arrival_s=np.sort(rng.uniform(0, 1e5, n)),
        prompt_tokens=rng.integers(100, 2_000, n),
        output_tokens=rng.integers(1, 400, n),
        prefix_offsets=np.arange(n + 1, dtype=np.int64) * 4,
        prefix_ids=rng.integers(0, 100_000, 4 * n).astype(np.int32),
        prefix_block_tokens=np.full(n, 16, np.int32),
        session=np.arange(n, dtype=np.int32) // 4,
        turn=np.arange(n, dtype=np.int32) % 4,
        think_s=np.full(n, 1.0),
    )
    started = time.process_time()
    assert offered_load(trace, TP8) > 0
    assert time.process_time() - started < 15.0

"""Slices of long prompts in the replay: who gets which, what is believed, what is learned."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from trimtab.engine_bridge.engine_spec import EngineSpec, get_engine_spec
from trimtab.engine_bridge.plan import Plan, load_plan, with_values
from trimtab.engine_bridge.replay.engine import ReplayEngine
from trimtab.engine_bridge.replay.layout import FINISHED
from trimtab.engine_bridge.replay.slices import first_alike
from trimtab.engine_bridge.trace import NO_SLICE, Trace
from trimtab.engine_bridge.vllm.ledger import Ledger

SPEC = get_engine_spec("h100:llama-3.1-8b-tp1")
PLAN = with_values(load_plan(), {"rules.late_shedding": False})
SLICE, PROMPT = 4096, 20_000
ROWS = -(-PROMPT // SLICE)
"""Of one request, its slices included."""


def in_turn(names: str, *, every_s: float = 30.0, tenants: str = "") -> Trace:
    """Prompts of 20,000 tokens in slices: equal names are equal prompts."""
    count, blocks = len(names), PROMPT // 16
    ids = [np.arange(blocks) + blocks * (ord(name) - ord("a")) for name in names]
    has_ids = np.tile(np.arange(ROWS) == ROWS - 1, count)
    known = tuple(sorted(set(tenants))) or ("one",)
    return Trace.build(
        arrival_s=np.repeat(every_s * np.arange(count), ROWS),
        prompt_tokens=np.tile([*range(SLICE, PROMPT, SLICE), PROMPT], count),
        output_tokens=np.where(has_ids, 40, 1),
        tier=0, tier_names=("T1",),
        tenant=np.repeat([known.index(t) for t in tenants] or [0] * count, ROWS),
        tenant_names=known,
        session=np.repeat(np.arange(count), ROWS).astype(np.int32),
        turn=np.tile(np.arange(ROWS), count).astype(np.int32),
        think_s=np.full(count * ROWS, 0.001),
        prefix_ids=np.concatenate(ids).astype(np.int32),
        prefix_offsets=np.concatenate(([0], np.cumsum(np.where(has_ids, blocks, 0)))),
        prefix_block_tokens=np.full(count * ROWS, 16, np.int32),
        slice_of=np.where(
            has_ids, NO_SLICE, np.repeat(ROWS * (1 + np.arange(count)) - 1, ROWS)
        ).astype(np.int32),
    )  # fmt: skip


def served(trace: Trace, plan: Plan = PLAN, spec: EngineSpec = SPEC) -> ReplayEngine:
    engine = ReplayEngine(trace, plan, spec)
    engine.run(interval_s=10.0)
    return engine


def sent(engine: ReplayEngine) -> list[int]:
    """How many rows of each request came to the engine."""
    came = np.isfinite(engine.result().requests["arrival_s"])
    return list(came.reshape(-1, ROWS).sum(1).tolist())


def test_slices_are_alike_by_content_and_tenant() -> None:
    same = first_alike(in_turn("aba")).reshape(3, ROWS)
    assert same[:, -1].tolist() == [NO_SLICE] * 3
    assert same[0].tolist() == [0, 1, 2, 3, NO_SLICE]
    assert same[2].tolist() == same[0].tolist()
    assert same[1].tolist() == [5, 6, 7, 8, NO_SLICE]
    apart = first_alike(in_turn("aa", tenants="xy"))
    assert apart[ROWS : 2 * ROWS - 1].tolist() == [5, 6, 7, 8]


def test_beyond_a_prompts_ids_nothing_is_alike() -> None:
    trace = in_turn("aa")
    few = replace(trace, prefix_block_tokens=np.full(len(trace), 4, np.int32))
    assert first_alike(few).reshape(2, ROWS)[:, :-1].tolist() == [[0, 1, 2, 3], [0, 6, 7, 8]]


def test_what_was_read_is_not_read_again_by_whomever() -> None:
    assert sent(served(in_turn("aba"))) == [ROWS, ROWS, 1]
    assert sent(served(in_turn("aa", tenants="xy"))) == [ROWS, ROWS]


@pytest.mark.parametrize(("blocks", "again"), [(10_000, 0), (2000, 1), (1300, 3)])
def test_what_is_not_found_is_read_in_slices_the_time_after(blocks: int, again: int) -> None:
    """b takes a's blocks from the end; what ends a slice or more beyond is believed no more."""
    spec = SPEC.with_limits(num_gpu_blocks=1 + blocks)
    assert sent(served(in_turn("abaa"), spec=spec)) == [ROWS, ROWS, 1, again + 1]


def test_after_a_slice_that_is_refused_the_request_itself_follows() -> None:
    crowd = in_turn("abcdefghijklmnopqrst", every_s=0.01)
    engine = served(crowd, plan=with_values(load_plan(), {"tiers.T1.targets.ttft_ms": 800}))
    rows: dict[str, npt.NDArray[Any]] = dict(engine.result().requests)
    came = np.isfinite(rows["arrival_s"]).reshape(-1, ROWS)
    read = (rows["outcome"] == FINISHED).reshape(-1, ROWS)
    assert came[:, -1].all()
    refused = came[:, :-1] & ~read[:, :-1]
    assert refused.any()
    assert (refused.sum(1) <= 1).all()
    for request in np.flatnonzero(refused.any(1)):
        first = int(np.argmax(refused[request]))
        assert not came[request, first + 1 : -1].any()
    assert engine.finished


def predicted(engine: ReplayEngine) -> tuple[float, int]:
    (tenant,) = engine._state.tenants
    return float(tenant.predicted_output), int(tenant.samples)


def test_what_slices_generate_is_no_answer_to_learn_from() -> None:
    trace = in_turn("abc")
    whole = trace.take(np.arange(ROWS - 1, len(trace), ROWS))
    assert whole.slice_of is not None
    assert whole.slice_of.tolist() == [NO_SLICE] * 3
    whole = replace(whole, turn=np.zeros(3, np.int32))
    assert predicted(served(trace)) == predicted(served(whole))


@pytest.mark.parametrize(("is_slice", "samples"), [(False, 1), (True, 0)])
def test_nor_is_it_in_the_books_of_a_live_engine(is_slice: bool, samples: int) -> None:
    ledger = Ledger(PLAN, SPEC, blocks=1000, max_num_seqs=8)
    row = ledger.arrive(
        "r", tenant="t", tier=1, prompt_tokens=500, arrived_s=0.0, found_blocks=0,
        is_slice=is_slice,
    )  # fmt: skip
    account = int(ledger.state.req[row].tenant)
    assert (int(ledger.state.req[row].predicted) == 1) is is_slice
    ledger.end("r", FINISHED, 1)
    assert int(ledger.state.tenants.samples[account]) == samples
    ledger.close_interval(1.0, 0.0)
    again = ledger.arrive("s", tenant="t", tier=1, prompt_tokens=5, arrived_s=1.0, found_blocks=0)
    assert (again, int(ledger.state.req[again].slice)) == (row, NO_SLICE)

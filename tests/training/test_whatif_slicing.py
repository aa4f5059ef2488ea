"""Long prompts in slices in the replay: how the trace is cut and the rows put together again."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trimtab.agents.registry import make_policy
from trimtab.engine_bridge.engine_spec import EngineSpec, get_engine_spec
from trimtab.engine_bridge.plan import Plan, load_plan, with_values
from trimtab.engine_bridge.replay.engine import ReplayEngine
from trimtab.engine_bridge.slicing import ALIGN_TOKENS, cuts
from trimtab.engine_bridge.trace import Trace
from trimtab.training.traces.generate import generate
from trimtab.training.whatif.run import drive
from trimtab.training.whatif.slicing import Sliced, in_slices

SLICE = 4096


@pytest.fixture(scope="module")
def plan() -> Plan:
    return with_values(load_plan(), {"tiers.T1.slice_tokens": SLICE, "rules.late_shedding": False})


@pytest.fixture(scope="module")
def spec() -> EngineSpec:
    return get_engine_spec("h100:llama-3.1-8b-tp1")


def one_long(**more: object) -> Trace:
    """A long T1 prompt at 1 s beside a chat a tenth of a second later."""
    columns: dict[str, object] = {
        "arrival_s": [1.0, 1.1], "prompt_tokens": [20_000, 300], "output_tokens": [50, 20],
        "tier": [1, 0], "tenant": [0, 1], "tier_names": ("T0", "T1"), "tenant_names": ("a", "b"),
    }  # fmt: skip
    return Trace.build(**(columns | more))  # type: ignore[arg-type]


@given(prompt=st.integers(1, 600_000), tokens=st.integers(1024, 100_000), more=st.integers(0, 9999))
def test_cuts_are_whole_blocks_below_the_prompt_and_the_same_for_a_longer_one(
    prompt: int, tokens: int, more: int
) -> None:
    ends = cuts(prompt, tokens)
    steps = np.diff([0, *ends, prompt])
    assert all(end % ALIGN_TOKENS == 0 and 0 < end < prompt for end in ends)
    assert all(0 < step <= tokens for step in steps)
    assert cuts(prompt + more, tokens)[: len(ends)] == ends


def test_a_plan_without_slices_leaves_the_trace_and_the_run_alone(spec: EngineSpec) -> None:
    trace, plan = one_long(), load_plan()
    sliced = in_slices(trace, plan, spec)
    assert sliced.trace is trace
    engine = ReplayEngine(trace, plan, spec)
    engine.run(interval_s=10.0)
    rows = engine.result().requests
    assert sliced.fold(rows) == rows


def test_a_long_prompt_becomes_turns_that_share_their_prefix(plan: Plan, spec: EngineSpec) -> None:
    sliced = in_slices(one_long(), plan, spec)
    trace = sliced.trace
    trace.check()
    assert trace.prompt_tokens.tolist() == [4096, 8192, 12_288, 16_384, 20_000, 300]
    assert trace.output_tokens.tolist() == [1, 1, 1, 1, 50, 20]
    assert trace.turn.tolist() == [0, 1, 2, 3, 4, 0]
    assert trace.slice_of is not None
    assert trace.slice_of.tolist() == [4, 4, 4, 4, -1, -1]
    assert sliced.first.tolist() == [0, 5]
    assert sliced.last.tolist() == [4, 5]
    engine = ReplayEngine(trace, plan, spec)
    engine.run(interval_s=10.0)
    assert engine.result().requests["cached_tokens"].tolist() == [0, 4096, 8192, 12_288, 16_384, 0]


def test_the_row_of_a_request_tells_of_all_its_slices(plan: Plan, spec: EngineSpec) -> None:
    sliced = in_slices(one_long(), plan, spec)
    engine = ReplayEngine(sliced.trace, plan, spec)
    engine.run(interval_s=10.0)
    rows = engine.result().requests
    whole = sliced.fold(rows)
    assert whole["arrival_s"].tolist() == [1.0, 1.1]
    assert whole["admitted_s"][0] == rows["admitted_s"][0]
    assert whole["first_token_s"][0] == rows["first_token_s"][4] > rows["last_token_s"][3]
    assert whole["last_token_s"][0] == rows["last_token_s"][4]
    assert whole["cached_tokens"].tolist() == [0, 0]
    assert whole["prompt_tokens"].tolist() == [20_000, 300]
    assert whole["output_tokens"].tolist() == [50, 20]
    assert whole["service_ms"][0] == pytest.approx(rows["service_ms"][:5].sum())
    assert whole["outcome"].tolist() == [1, 1]
    for name, column in whole.items():
        assert len(column) == 2
        assert column.dtype == rows[name].dtype


def test_what_was_cached_before_its_slices_stays_cached(plan: Plan, spec: EngineSpec) -> None:
    ids = np.arange(20_000 // 16)
    later = np.concatenate([ids, 5000 + np.arange(20_000 // 16)])
    trace = Trace.build(
        arrival_s=[0.0, 30.0], prompt_tokens=[20_000, 40_000], output_tokens=[5, 5], tier=0,
        tier_names=("T1",), prefix_ids=np.concatenate([ids, later]).astype(np.int32),
        prefix_offsets=np.array([0, len(ids), len(ids) + len(later)]),
        prefix_block_tokens=np.array([16, 16], np.int32),
    )  # fmt: skip
    sliced = in_slices(trace, plan, spec)
    engine = ReplayEngine(sliced.trace, plan, spec)
    engine.run(interval_s=10.0)
    rows = engine.result().requests
    came = np.isfinite(rows["arrival_s"])
    # What the first one's slices have read is not read again.
    assert rows["prompt_tokens"][came].tolist() == [
        4096, 8192, 12_288, 16_384, 20_000, 20_480, 24_576, 28_672, 32_768, 36_864, 40_000,
    ]  # fmt: skip
    folded = sliced.fold(rows)
    assert folded["cached_tokens"].tolist() == [0, 20_000]
    assert folded["arrival_s"].tolist() == [0.0, 30.0]


def test_who_gives_up_or_fits_no_cache_stays_whole(plan: Plan, spec: EngineSpec) -> None:
    leaves = one_long(cancel_after_s=np.array([60.0, np.inf]))
    assert in_slices(leaves, plan, spec).trace is leaves
    too_long = one_long(prompt_tokens=[spec.kv_tokens, 300])
    assert in_slices(too_long, plan, spec).trace is too_long
    uncached = spec.with_limits(enable_prefix_caching=False)
    assert len(in_slices(one_long(), plan, uncached).trace) == 2


def test_a_run_that_ends_between_slices_leaves_the_request_unfinished(
    plan: Plan, spec: EngineSpec
) -> None:
    sliced = in_slices(one_long(), plan, spec)
    engine = ReplayEngine(sliced.trace, plan, spec)
    engine.advance(1.05)
    rows = sliced.fold(engine.result().requests)
    assert rows["outcome"].tolist() == [0, 0]
    assert rows["arrival_s"][0] == 1.0
    assert np.isnan(rows["first_token_s"][0])


@settings(max_examples=6)
@given(seed=st.integers(0, 100), tokens=st.sampled_from([1024, 5000, 20_000]))
def test_every_request_of_a_mix_is_told_of_once(seed: int, tokens: int) -> None:
    spec = get_engine_spec("h100:llama-3.1-8b-tp1")
    trace = generate(hours=0.05, seed=seed, preset="poison", load=0.7, spec=spec)
    changes = {f"tiers.{tier}.slice_tokens": tokens for tier in ("T1", "T2")}
    plan = with_values(load_plan(), changes)
    sliced = in_slices(trace, plan, spec)
    assert isinstance(sliced, Sliced)
    sliced.trace.check()
    assert len(sliced.trace) > len(trace)
    # A turn's slices come before it and after the turn before it.
    order = np.lexsort((sliced.trace.turn, sliced.trace.session))
    same = np.diff(sliced.trace.session[order]) == 0
    assert np.all(np.diff(order)[same & (sliced.trace.session[order][1:] >= 0)] > 0)
    rows = drive(trace, make_policy("static"), plan, spec, seed=0, drain_s=600.0).requests
    assert np.array_equal(rows["prompt_tokens"], trace.prompt_tokens)
    assert np.array_equal(rows["output_tokens"], trace.output_tokens)
    assert np.array_equal(rows["tenant"], trace.tenant)
    open_loop = trace.turn == 0
    assert np.allclose(rows["arrival_s"][open_loop], trace.arrival_s[open_loop])
    assert np.all(rows["cached_tokens"] < rows["prompt_tokens"])
    done = rows["outcome"] == 1
    assert done.mean() > 0.5
    assert np.all(rows["first_token_s"][done] > rows["arrival_s"][done])

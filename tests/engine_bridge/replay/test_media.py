"""Media items in the replay: when they are encoded, what that costs, what the rules make of it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engine_bridge.replay.invariants import check_invariants
from tests.engine_bridge.replay.vllm_encoder import Scheduler
from tests.engine_bridge.replay.workloads import (
    encoding_engine,
    prompts,
    random_trace,
    small_engine,
    with_media,
)
from trimtab.engine_bridge.draft_spec import DraftSpec
from trimtab.engine_bridge.engine_spec import EngineSpec
from trimtab.engine_bridge.plan import Plan, load_plan, with_values
from trimtab.engine_bridge.replay.engine import ReplayEngine, RuleSet
from trimtab.engine_bridge.replay.handle import handle_of
from trimtab.engine_bridge.replay.layout import FINISHED, OPEN
from trimtab.engine_bridge.replay.left_out import lift_left_out
from trimtab.engine_bridge.rules.fair_queue import tenant_start_ms, tier_start_ms
from trimtab.engine_bridge.trace import Trace

PLAIN = with_values(load_plan(None), {"rules.slack_chunk": False, "rules.feasible_first": False})
T0, T2 = 0, 2


def engine(
    trace: Trace, spec: EngineSpec, rules: RuleSet = "fcfs", plan: Plan = PLAIN
) -> ReplayEngine:
    return ReplayEngine(trace, plan, spec, rules=rules, record_steps=True)


def steps(replay: ReplayEngine) -> list[dict[int, int]]:
    """Tokens by row of each step, until all is done; the invariants hold between any two."""
    seen = []
    while not replay.finished:
        seen.append(replay.step())
        check_invariants(replay._state)
    return seen


def busy_by_step_ms(replay: ReplayEngine) -> list[float]:
    ms, before = [], 0.0
    while not replay.finished:
        replay.step()
        ms.append(float(replay._state.engine[0].busy_ms) - before)
        before += ms[-1]
    return ms


def test_an_item_is_encoded_whole_in_the_step_that_reaches_it() -> None:
    trace = prompts((0.0, T0, 1000, 1, [(300, 200, 0)]))
    spec = small_engine(tokens=400)
    with_encoder = busy_by_step_ms(engine(trace, encoding_engine(spec)))
    without = busy_by_step_ms(engine(trace, spec))
    # The first chunk ends in the middle of the item: all of its 200 tokens of 100 us are encoded.
    assert np.array(with_encoder) - without == pytest.approx([20.0, 0.0, 0.0])


@pytest.mark.parametrize("rules", ["fair", "fcfs"])
def test_encode_time_is_booked_to_the_request_whose_item_it_is(rules: RuleSet) -> None:
    trace = prompts((0.0, T0, 300, 1, [(0, 200, 0)]), (0.0, T0, 300, 1, []))
    got = engine(trace, encoding_engine(small_engine()), rules)
    steps(got)
    result = got.result()
    assert result.encode_ms == pytest.approx([20.0, 0.0])
    service = result.requests["service_ms"]
    assert service[0] - service[1] == pytest.approx(20.0)
    assert service.sum() == pytest.approx(result.engine_busy_s * 1e3)


def test_what_two_requests_show_is_encoded_once() -> None:
    same = [(0, 200, 0)]
    trace = prompts((0.0, T0, 300, 5, same), (0.0, T0, 300, 5, same), (9.0, T0, 300, 5, same))
    got = engine(trace, encoding_engine(small_engine()))
    steps(got)
    assert got.result().encode_ms == pytest.approx([20.0, 0.0, 0.0])


def test_a_request_that_shows_the_same_twice_keeps_it_until_the_second_is_computed() -> None:
    twice = [(0, 200, 0), (350, 200, 0)]
    trace = prompts((0.0, T0, 600, 1, twice), (0.0, T0, 500, 1, [(0, 400, 1)]))
    # The cache holds either; the other request's item must wait for the first one's second sight.
    spec = encoding_engine(small_engine(tokens=500), budget_tokens=1000, cache_tokens=500)
    got = engine(trace, spec)
    assert steps(got) == [{0: 500}, {0: 100}, {1: 500}]
    assert got.result().encode_ms == pytest.approx([20.0, 40.0])


def test_what_a_step_may_not_encode_waits_and_others_go_on() -> None:
    trace = prompts(
        (0.0, T0, 300, 1, [(0, 250, 0)]),
        (0.0, T0, 400, 1, [(100, 250, 1)]),
        (0.0, T0, 300, 1, [(0, 250, 2)]),
        (0.0, T0, 50, 1, []),
    )
    spec = encoding_engine(small_engine(), budget_tokens=400, cache_tokens=2000)
    assert steps(engine(trace, spec)) == [
        {0: 300, 1: 100, 3: 50},
        {1: 300},
        {2: 300},
    ]


def test_a_cached_prefix_may_end_inside_an_item() -> None:
    """What is left of it needs the whole item encoded."""
    item = [(0, 256, 0)]
    ids = np.arange(2)
    trace = prompts(
        (0.0, T0, 128, 1, []),
        (1.0, T0, 400, 1, item),
        prefix_offsets=np.array([0, 2, 4]),
        prefix_ids=np.concatenate([ids, ids]).astype(np.int32),
        prefix_block_tokens=np.array([64, 64], np.int32),
    )
    got = engine(trace, encoding_engine(small_engine()))
    assert steps(got) == [{0: 128}, {1: 272}]
    assert got.result().encode_ms == pytest.approx([0.0, 25.6])


def test_what_a_cached_prefix_covers_is_not_encoded() -> None:
    item = [(0, 128, 0)]
    trace = prompts(
        (0.0, T0, 200, 1, item),
        (1.0, T0, 400, 1, item),
        prefix_offsets=np.array([0, 3, 6]),
        prefix_ids=np.array([0, 1, 2, 0, 1, 2], np.int32),
        prefix_block_tokens=np.array([64, 64], np.int32),
    )
    spec = encoding_engine(small_engine(), cache_tokens=128)
    got = engine(trace, spec)
    steps(got)
    assert got.result().encode_ms == pytest.approx([12.8, 0.0])
    # Nor does an estimate count it: only the uncached part.
    fair = engine(trace, spec, "fair")
    fair.advance(0.5)
    first = fair._state.req[0].prefill_estimate_ms
    fair.advance(1.0)
    assert fair._state.req[1].prefill_estimate_ms < first


def test_without_an_encoder_media_are_prompt_tokens() -> None:
    text = random_trace(3)
    shown = with_media(text, 3)
    for rules in ("fair", "fcfs"):
        runs = [
            ReplayEngine(t, load_plan(None), small_engine(), rules=rules) for t in (text, shown)
        ]  # type: ignore[arg-type]
        for run in runs:
            run.run(interval_s=5.0)
        assert runs[0].result().digest() == runs[1].result().digest()
        assert not runs[1].result().encode_ms.any()


def test_an_item_takes_its_time_s_worth_of_the_prefill_budget() -> None:
    """Rule 4: beside an item of half the budget's time only half of the text fits."""
    trace = prompts((0.0, T0, 120, 1, [(0, 100, 0)]), (0.0, T0, 2000, 1, []))
    plan = with_values(PLAIN, {"prefill.budget_tokens": 1000, "rules.prefill_shares": False})
    spec = small_engine()
    probe = engine(trace, encoding_engine(spec), "fair", plan)
    half_ms = 500 * float(probe._state.engine[0].prefill_share_ms)
    got = engine(trace, encoding_engine(spec, us_per_token=half_ms * 10.0), "fair", plan)
    assert steps(got)[0] in ({0: 120, 1: 380}, {0: 120, 1: 379})


def test_an_item_over_the_budget_has_its_step_to_itself() -> None:
    trace = prompts((0.0, T0, 120, 1, [(20, 100, 0)]), (1e-6, T0, 2000, 1, []))
    plan = with_values(PLAIN, {"prefill.budget_tokens": 1000, "rules.prefill_shares": False})
    got = engine(trace, encoding_engine(small_engine(), item_ms=200.0), "fair", plan)
    seen = steps(got)
    # Its text first; the item when its request comes first in a step.
    assert seen == [{0: 20}, {0: 100}, {1: 1000}, {1: 1000}]


def test_a_tenant_s_item_does_not_hold_up_the_other_tenants_of_its_tier() -> None:
    trace = prompts(
        (0.0, T0, 300, 1, [(0, 250, 0)]),
        (0.0, T0, 310, 1, [(0, 250, 1)]),
        (0.0, T0, 600, 1, []),
    )
    spec = encoding_engine(small_engine(), budget_tokens=400, cache_tokens=2000, us_per_token=1.0)
    assert steps(engine(trace, spec, "fair")) == [{0: 300, 2: 600}, {1: 310}]


@pytest.mark.parametrize("rules", ["fair", "fcfs", "priority"])
@pytest.mark.parametrize("lagging", [False, True])
@pytest.mark.parametrize("drafting", [False, True])
def test_collapsing_changes_nothing(rules: RuleSet, lagging: bool, drafting: bool) -> None:
    draft = DraftSpec(tokens=3, acceptance=(("T0", 0.7), ("T2", 0.5))) if drafting else None
    spec = replace(small_engine().with_limits(async_scheduling=lagging), draft=draft)
    plan = with_values(load_plan(None), {"tiers.T0.draft_tokens": 3})
    for seed in (1, 4):
        trace = with_media(random_trace(seed), seed)
        runs = [
            ReplayEngine(
                trace, plan, encoding_engine(spec, item_ms=50.0), rules=rules, collapse=collapse
            )
            for collapse in (True, False)
        ]
        for run in runs:
            run.run(interval_s=2.0)
        whole, single = (run.result() for run in runs)
        assert whole.digest() == single.digest()
        assert np.array_equal(whole.encode_ms, single.encode_ms)
        assert whole.encode_ms.any()


@given(
    seed=st.integers(0, 10_000),
    rules=st.sampled_from(("fcfs", "priority")),
    tokens=st.integers(50, 1500),
    seqs=st.integers(1, 8),
    budget=st.integers(1, 900),
    cache=st.integers(1, 1200),
)
@settings(max_examples=40, deadline=None)
def test_the_stock_rules_encode_as_vllm_does(
    seed: int, rules: RuleSet, tokens: int, seqs: int, budget: int, cache: int
) -> None:
    trace = with_media(random_trace(seed, requests=20), seed)
    n = len(trace)
    trace = replace(
        trace,
        arrival_s=np.zeros(n),
        session=np.full(n, -1, np.int32),
        turn=np.zeros(n, np.int32),
        think_s=np.zeros(n),
        cancel_after_s=np.full(n, np.inf),
    )
    spec = small_engine(blocks=20_000, seqs=seqs, tokens=max(tokens, seqs), caching=False)
    spec = encoding_engine(spec, budget_tokens=budget, cache_tokens=cache)
    assert spec.encoder is not None
    largest = int(trace.media.tokens.max(initial=0))
    budget, cache = spec.encoder.limits(spec.max_num_batched_tokens, largest)
    vllm = Scheduler(
        trace,
        by_tier=rules == "priority",
        tokens=spec.max_num_batched_tokens,
        seqs=seqs,
        budget=budget,
        cache=cache,
    )
    got = engine(trace, spec, rules, load_plan(None))
    while not got.finished:
        expected = vllm.step()
        if vllm.starved:
            # docs/media.md: the replay never lets a prompt take a decode's token.
            return
        assert got.step() == expected
        state = got._state
        encoded = np.flatnonzero(state.encoded.step == state.engine[0].step - 1)
        assert sorted(encoded) == sorted(vllm.encoded)
        assert int(state.engine[0].encoder_free) == vllm.encoder.free
        assert int(state.engine[0].encoder_freeable) == vllm.encoder.freeable_slots


@given(
    seed=st.integers(0, 10_000),
    rules=st.sampled_from(("fair", "fair", "fcfs", "priority")),
    blocks=st.integers(200, 900),
    budget=st.integers(1, 900),
    cache=st.integers(1, 1200),
    item_ms=st.sampled_from((0.0, 3.0, 400.0)),
    longest_ms=st.sampled_from((None, 20.0)),
)
@settings(max_examples=10, deadline=None)
def test_whatever_is_shown_the_books_stay_true_and_everybody_is_served(
    seed: int,
    rules: RuleSet,
    blocks: int,
    budget: int,
    cache: int,
    item_ms: float,
    longest_ms: float | None,
) -> None:
    trace = with_media(random_trace(seed, requests=25, rate=60.0), seed)
    trace = replace(trace, cancel_after_s=np.full(len(trace), np.inf))
    spec = encoding_engine(
        small_engine(blocks=blocks), budget_tokens=budget, cache_tokens=cache, item_ms=item_ms
    )
    plan = with_values(
        load_plan(None),
        {"rules.late_shedding": False, "isolation.longest_step_ms": longest_ms},
    )
    got = engine(trace, spec, rules, plan)
    state = got._state
    while not got.finished:
        got.step()
        if int(state.engine[0].step) % 5 == 0:
            check_invariants(state)
    result = got.result()
    fits = trace.prompt_tokens + trace.output_tokens <= (blocks - 1) * spec.block_size
    assert np.all(result.requests["outcome"][fits] == FINISHED)
    assert result.requests["service_ms"].sum() == pytest.approx(result.engine_busy_s * 1e3)


def _stream_beside_chats(*, item_ms: float, every_s: float, text_tokens: int) -> Trace:
    """Chats of T0 that decode, and batch prompts of T2 with one long item each."""
    rows: list[Any] = [(0.0, T0, 200, 600, []) for _ in range(16)]
    for number in range(200):
        rows.append((1.0 + every_s * number, T2, text_tokens, 2, [(0, 100, number)]))
    return prompts(*rows)


@pytest.mark.parametrize("text_tokens", [120, 3000])
def test_items_over_the_limit_leave_protected_decodes_their_pace(text_tokens: int) -> None:
    """Each takes three times the TPOT target; the chats keep it on average, and all are served."""
    trace = _stream_beside_chats(item_ms=120.0, every_s=0.01, text_tokens=text_tokens)
    spec = encoding_engine(
        small_engine(blocks=9000, seqs=64), item_ms=120.0, us_per_token=0.0, budget_tokens=1000
    )
    plan = load_plan(None)
    tpot_s = (plan.tiers["T0"].targets.tpot_ms or 0.0) * 1e-3
    by_rules = {}
    for rules in ("fair", "fcfs"):
        got = engine(trace, spec, rules, plan)  # type: ignore[arg-type]
        while not got.finished:
            got.step()
        columns = got.result().requests
        assert np.all(columns["outcome"] == FINISHED)
        chats = trace.tier == T0
        lasted_s = (columns["last_token_s"] - columns["first_token_s"])[chats]
        by_rules[rules] = lasted_s / (trace.output_tokens[chats] - 1)
    # One item may be owed still when a chat ends.
    assert by_rules["fair"].max() <= tpot_s + 0.120 / 599
    assert by_rules["fcfs"].min() > tpot_s


@pytest.mark.parametrize("passes", [0, 1], ids=["last-pass", "first-pass"])
def test_who_waits_for_an_item_banks_no_credit_in_a_step_that_is_full(passes: int) -> None:
    """Rule 3: others start meanwhile, whether or not the step then runs out of time."""
    trace = prompts((0.0, T0, 300, 1, [(0, 250, 0)]), (0.0, T0, 310, 1, [(0, 250, 1)]))
    spec = encoding_engine(small_engine(), budget_tokens=400, cache_tokens=2000, us_per_token=1.0)
    got = engine(trace, spec, "fair")
    assert got.step() == {0: 300}
    state = got._state
    e, tier, tenant = state.engine[0], state.tiers[T0], state.tenants[state.req[1].tenant]
    assert e.item_held == 1
    tenant.held_mark = e.mark - passes
    state.totals[OPEN] = 0.0
    e.tier_v += 1000.0
    tier.tenant_v += 1000.0
    lift_left_out(handle_of(state))
    assert tier_start_ms(tier) >= e.tier_v - tier.largest_estimate_ms / tier.weight
    assert tenant_start_ms(tenant) >= tier.tenant_v - tier.largest_estimate_ms / tenant.share

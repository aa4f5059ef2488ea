"""Rule 9: what drafts are expected to give, which length is chosen, and when it changes."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trimtab.engine_bridge.engine_spec import get_engine_spec
from trimtab.engine_bridge.replay.records import DRAFTING, records
from trimtab.engine_bridge.rules import draft_lengths
from trimtab.engine_bridge.rules.draft_lengths import MARGIN, PROBE_STEPS, SETTLE_STEPS
from trimtab.engine_bridge.rules.speculation import (
    PREFILL_WORTH,
    best_drafts,
    drafting_ms,
    tokens_per_step,
    verified_step_ms,
)

COEF = get_engine_spec("h100:llama-3.1-8b-tp1").coef
MOST = 6
FREE = np.array([0.0, 0.0, PREFILL_WORTH])


@given(st.floats(0.0, 1.0), st.floats(0.1, 1.0), st.integers(0, 8))
def test_expected_tokens_are_those_of_a_chain_of_draws(
    share: float, kept: float, drafts: int
) -> None:
    chain = [np.prod([share * kept**place for place in range(n)]) for n in range(drafts + 1)]
    assert tokens_per_step(share, kept, drafts) == pytest.approx(sum(chain))
    assert 1.0 <= tokens_per_step(share, kept, drafts) <= drafts + 1


def _rate(facts: Any, decodes: float, share: float, cost: Any, length: int) -> float:
    drafts = decodes * length
    ms = verified_step_ms(COEF, facts, drafts)
    ms += drafting_ms(cost[0], cost[1], drafts, float(length))
    return (decodes * tokens_per_step(share, 1.0, length) + cost[2] * facts[3]) / ms


@given(
    decodes=st.integers(1, 256),
    context=st.integers(10, 4000),
    chunk=st.integers(0, 4000),
    share=st.floats(0.0, 1.0),
    us=st.floats(0.0, 200.0),
    pass_ms=st.floats(0.0, 3.0),
    now=st.integers(0, MOST),
)
def test_no_other_length_wins_more_than_the_margin(
    decodes: int, context: int, chunk: int, share: float, us: float, pass_ms: float, now: int
) -> None:
    facts = np.array([decodes, decodes * context, chunk > 0, chunk, 0.5 * chunk * chunk, 0])
    facts = facts.astype(np.float64)
    cost = np.array([us, pass_ms, PREFILL_WORTH])
    best = best_drafts(
        COEF, facts, float(decodes), share, 1.0, np.zeros(3), cost, MOST, now, MARGIN
    )
    rates = [_rate(facts, decodes, share, cost, length) for length in range(MOST + 1)]
    assert rates[best] * (1 + 2 * MARGIN) >= max(rates)
    if best != now:
        assert rates[best] > rates[now] * (1 + MARGIN)


def test_a_prefill_that_a_longer_step_would_delay_shortens_drafts() -> None:
    alone = np.array([32.0, 32 * 800.0, 0.0, 0.0, 0.0, 0.0])
    beside = np.array([32.0, 32 * 800.0, 1.0, 1500.0, 0.5 * 1500**2, 0.0])
    lengths = [
        best_drafts(COEF, facts, 32.0, 0.4, 1.0, np.zeros(3), FREE, MOST, 0, MARGIN)
        for facts in (alone, beside)
    ]
    assert lengths[0] > lengths[1]


class Engine:
    """A batch of decodes whose drafts are right with a given share."""

    def __init__(self, *batch: int, most: int = MOST, seed: int = 0) -> None:
        self.drafting = records(len(batch), DRAFTING)
        draft_lengths.begin(self.drafting)
        draft_lengths.allow(self.drafting, [most] * len(batch))
        self.batch, self.steps = batch, 0
        self.smoothed = np.zeros(6)
        self.rng = np.random.default_rng(seed)
        self.chosen: list[list[int]] = []

    def run(self, steps: int, *shares: float) -> None:
        for _ in range(steps):
            for tier, decodes, share in zip(self.drafting, self.batch, shares, strict=True):
                length = draft_lengths.length_now(tier, self.steps)
                tier.decoding = decodes
                for _ in range(decodes):
                    right = self.rng.random(length) < share
                    accepted = length if right.all() else int(np.argmin(right))
                    if length:
                        draft_lengths.observe(tier, 1.0, length, accepted)
            decodes = sum(self.batch)
            facts = np.array([decodes, decodes * 800, 0.0, 0.0, 0.0, 0.0])
            draft_lengths.choose(COEF, self.drafting, facts, self.smoothed, FREE, 1.0, self.steps)
            self.steps += 1
            self.chosen.append([int(length) for length in self.drafting.length])


@pytest.mark.parametrize("share", [0.2, 0.5, 0.9])
def test_acceptance_is_learned_whatever_is_verified(share: float) -> None:
    engine = Engine(32)
    engine.run(200, share)
    assert draft_lengths.acceptance(engine.drafting[0]) == pytest.approx(share, abs=0.06)


def test_changes_are_at_least_the_settling_time_apart() -> None:
    engine = Engine(128)
    for share in (0.8, 0.3, 0.9, 0.1, 0.6):
        engine.run(40, share)
    changes = [n for n, (a, b) in enumerate(pairwise(engine.chosen)) if a != b]
    assert len(changes) > 1
    assert min(later - earlier for earlier, later in pairwise(changes)) >= SETTLE_STEPS


def test_a_tier_at_0_probes_in_one_of_so_many_steps_and_comes_back() -> None:
    engine = Engine(128)
    engine.run(200, 0.05)
    assert engine.chosen[-1] == [0]
    lengths = [draft_lengths.length_now(engine.drafting[0], n) for n in range(2 * PROBE_STEPS)]
    assert sum(lengths) == 2
    engine.run(6 * PROBE_STEPS, 0.95)
    assert engine.chosen[-1][0] > 0


def test_what_one_tier_learns_is_not_another_s() -> None:
    engine = Engine(16, 16)
    engine.run(200, 0.9, 0.1)
    known = [draft_lengths.acceptance(tier) for tier in engine.drafting]
    assert known == pytest.approx([0.9, 0.1], abs=0.08)
    assert engine.chosen[-1][0] > engine.chosen[-1][1]


def test_no_tier_verifies_more_than_it_may() -> None:
    engine = Engine(4, most=3)
    engine.run(100, 1.0)
    assert max(length for (length,) in engine.chosen) == 3
    draft_lengths.allow(engine.drafting, [0])
    engine.run(200, 1.0)
    assert draft_lengths.length_now(engine.drafting[0], 0) == 0

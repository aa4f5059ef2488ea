"""The scoring function: what is demanded, what counts as served."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.engine_bridge.test_pricing import trace_with_prefixes
from trimtab.envs import score

NAN = float("nan")


def test_demand_prices_fresh_repeated_and_output_tokens() -> None:
    trace = trace_with_prefixes([[0], [0]], [15, 15])
    # Second row: 5 fresh + 10 repeated at a tenth + 2 x 3 output = 12 priced tokens, value 10.
    assert score.demand(trace, np.array([10.0])) == pytest.approx([0.21, 0.12])


TARGETS = score.Targets(
    ttft_ms=np.array([800.0, np.inf]),
    tpot_ms=np.array([40.0, np.inf]),
    e2e_ms=np.array([np.inf, 240_000.0]),
)


def judged(outcome: int, *, ttft: float, tpot: float, e2e: float, tier: int = 0) -> score.Met:
    return score.judge(
        tier=np.array([tier]),
        outcome=np.array([outcome]),
        seen=score.Latencies(
            ttft_ms=np.array([ttft]), tpot_ms=np.array([tpot]), e2e_ms=np.array([e2e])
        ),
        to=TARGETS,
    )


@pytest.mark.parametrize(
    ("outcome", "ttft", "tpot", "e2e", "tier", "served"),
    [
        (score.FINISHED, 800.0, 40.0, 9e9, 0, True),
        (score.FINISHED, 801.0, 40.0, 1.0, 0, False),
        (score.FINISHED, 10.0, 41.0, 1.0, 0, False),
        (score.FINISHED, 10.0, NAN, 10.0, 0, True),
        (score.FINISHED, 9e9, 9e9, 240_000.0, 1, True),
        (score.FINISHED, 1.0, 1.0, 240_001.0, 1, False),
        (score.REFUSED, NAN, NAN, NAN, 0, False),
        (score.SHED, NAN, NAN, NAN, 0, False),
        (score.UNFINISHED, 10.0, 10.0, NAN, 0, False),
        (score.UNFINISHED, NAN, NAN, NAN, 1, False),
        (score.CANCELLED, 10.0, 10.0, NAN, 0, True),
        (score.CANCELLED, 900.0, 10.0, NAN, 0, False),
        (score.CANCELLED, NAN, NAN, NAN, 0, False),
    ],
)
def test_who_counts_as_served(
    outcome: int, ttft: float, tpot: float, e2e: float, tier: int, served: bool
) -> None:
    met = judged(outcome, ttft=ttft, tpot=tpot, e2e=e2e, tier=tier)
    assert bool(met.every[0]) is served


def test_latencies_of_a_request_that_never_started_are_unknown() -> None:
    seen = score.latencies(
        arrival_s=np.array([1.0, 1.0]),
        first_token_s=np.array([NAN, 1.5]),
        last_token_s=np.array([NAN, 2.5]),
        generated_tokens=np.array([0, 11]),
    )
    assert np.isnan([seen.ttft_ms[0], seen.tpot_ms[0], seen.e2e_ms[0]]).all()
    assert [seen.ttft_ms[1], seen.tpot_ms[1], seen.e2e_ms[1]] == [500.0, 100.0, 1500.0]


@given(
    st.lists(st.tuples(st.floats(0, 1e6), st.booleans()), min_size=1, max_size=50).filter(
        lambda rows: sum(d for d, _ in rows) > 0
    )
)
def test_weighted_attainment_is_a_share(rows: list[tuple[float, bool]]) -> None:
    demanded = np.array([d for d, _ in rows])
    met = np.array([m for _, m in rows])
    share = score.weighted_attainment(demanded, met)
    assert 0.0 <= share <= 1.0 + 1e-12
    assert score.weighted_attainment(demanded, np.ones_like(met)) == 1.0


@given(st.lists(st.floats(0, 1), min_size=1, max_size=30))
def test_jain_is_between_one_over_n_and_one(shares: list[float]) -> None:
    index = score.jain_index(np.array(shares))
    assert 1 / len(shares) - 1e-9 <= index <= 1 + 1e-9


def test_jain_knows_its_corners() -> None:
    assert score.jain_index(np.array([0.3, 0.3, 0.3])) == pytest.approx(1.0)
    assert score.jain_index(np.array([1.0, 0.0, 0.0, 0.0])) == pytest.approx(0.25)
    assert score.jain_index(np.zeros(3)) == 1.0
    assert np.isnan(score.jain_index(np.array([])))

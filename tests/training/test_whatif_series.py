"""Series for plots: thinning keeps totals, load adds up, gaps stay gaps."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.training.fluid_engine import mixed_trace
from trimtab.engine_bridge.capacity import request_cost_ms
from trimtab.engine_bridge.engine_spec import get_engine_spec
from trimtab.training.whatif.series import POINTS, attainment_over_time, offered, thin


@given(st.integers(1, 3000))
def test_thinning_keeps_few_points_and_the_mean(rows: int) -> None:
    values = np.arange(rows, dtype=float)
    thinned = thin(values)
    assert 1 <= len(thinned) <= POINTS
    assert thinned[0] <= thinned[-1]
    if rows % len(thinned) == 0:
        assert thinned.mean() == pytest.approx(values.mean())


def test_thinning_works_on_columns_alike() -> None:
    values = np.random.default_rng(0).normal(size=(1000, 3))
    assert thin(values)[:, 1] == pytest.approx(thin(values[:, 1]))


def test_offered_load_has_the_mean_of_the_whole_trace() -> None:
    trace, spec = mixed_trace(hours=0.1), get_engine_spec("h100:llama-3.1-8b-tp1")
    tier = trace.tier.astype(np.int64)
    load = offered(trace, tier, 4, spec, mean_load=0.8)
    assert load.by_tier.sum(axis=1).mean() == pytest.approx(0.8)
    work_ms = request_cost_ms(spec, trace.prompt_tokens, trace.prompt_tokens, trace.output_tokens)
    by_tier = np.bincount(tier, weights=work_ms, minlength=4)
    assert load.by_tier.sum(axis=0) / load.by_tier.sum() == pytest.approx(by_tier / by_tier.sum())


def test_attainment_without_arrivals_is_unknown_not_zero() -> None:
    share = attainment_over_time(
        np.array([1.0, 1.0]),
        np.array([0, 0]),
        np.array([True, False]),
        tiers=2,
        duration_s=60.0,
    )
    assert share[1, 0] == 0.5
    assert np.isnan(share[2, 0])
    assert np.isnan(share[:, 1]).all()

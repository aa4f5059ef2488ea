"""What a seed may change in recorded traffic, and what it may not."""

from __future__ import annotations

import numpy as np
import pytest

from trimtab.engine_bridge.trace import Trace
from trimtab.training.whatif.variation import SESSION_JITTER_S, TENANT_OFFSET_S, session_rows, vary


@pytest.fixture(scope="module")
def trace() -> Trace:
    rng = np.random.default_rng(5)
    n = 600
    session = np.where(np.arange(n) % 3 == 0, -1, np.arange(n) // 12).astype(np.int32)
    turn = np.zeros(n, np.int32)
    for one in np.unique(session[session >= 0]):
        rows = np.flatnonzero(session == one)
        turn[rows] = np.arange(len(rows))
    return Trace.build(
        arrival_s=np.sort(rng.uniform(0, 3600, n)),
        prompt_tokens=rng.integers(1, 500, n),
        output_tokens=rng.integers(1, 90, n),
        tenant=np.where(session >= 0, session % 2, 2),
        tenant_names=("a", "b", "c"),
        session=session,
        turn=turn,
        think_s=np.where(turn > 0, 5.0, 0.0),
    )


def key(trace: Trace) -> list[tuple[int, int, int]]:
    columns = (trace.tenant, trace.prompt_tokens, trace.output_tokens)
    return sorted(zip(*(column.tolist() for column in columns), strict=True))


def test_seed_0_is_the_trace_as_recorded(trace: Trace) -> None:
    assert vary(trace, 0).digest() == trace.digest()


def test_a_seed_is_reproducible_and_seeds_differ(trace: Trace) -> None:
    assert vary(trace, 1).digest() == vary(trace, 1).digest()
    assert len({vary(trace, seed).digest() for seed in range(4)}) == 4


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_the_requests_stay_the_same_and_stay_lawful(trace: Trace, seed: int) -> None:
    varied = vary(trace, seed)
    varied.check()
    assert key(varied) == key(trace)
    assert varied.duration_s <= trace.duration_s + TENANT_OFFSET_S + SESSION_JITTER_S


def test_turns_of_a_session_keep_their_order_and_distances(trace: Trace) -> None:
    varied = vary(trace, 1)
    for one in np.unique(trace.session[trace.session >= 0]):
        before, after = (np.flatnonzero(t.session == one) for t in (trace, varied))
        assert varied.turn[after].tolist() == trace.turn[before].tolist()
        assert np.diff(varied.arrival_s[after]) == pytest.approx(np.diff(trace.arrival_s[before]))


def test_requests_of_one_tenant_move_together(trace: Trace) -> None:
    varied = vary(trace, 1)
    middle = slice(20, -20)
    moved = (
        varied.arrival_s[varied.tenant == 2][middle] - trace.arrival_s[trace.tenant == 2][middle]
    )
    assert np.ptp(moved) <= 2 * SESSION_JITTER_S + np.diff(trace.arrival_s).max() + 2.0


def test_prefixes_travel_with_their_rows() -> None:
    trace = Trace.build(
        arrival_s=np.arange(50) * 30.0,
        prompt_tokens=np.arange(50) + 20,
        output_tokens=1,
        tenant=np.arange(50) % 5,
        tenant_names=tuple("abcde"),
        prefix_offsets=np.arange(51),
        prefix_ids=np.arange(50, dtype=np.int32),
        prefix_block_tokens=np.full(50, 16, np.int32),
    )
    varied = vary(trace, 3)
    assert (varied.prefix_ids + 20 == varied.prompt_tokens).all()


def test_a_single_request_and_none_survive() -> None:
    one = Trace.build(arrival_s=[0.0], prompt_tokens=1, output_tokens=1)
    assert len(vary(one, 2)) == 1
    none = one.head(0)
    assert len(vary(none, 2)) == 0


def test_session_rows_point_at_the_first_turn(trace: Trace) -> None:
    rows = session_rows(trace)
    assert (trace.turn[rows[trace.session >= 0]] == 0).all()
    assert (rows[trace.session < 0] == np.flatnonzero(trace.session < 0)).all()

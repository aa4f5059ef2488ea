"""Composed traces hit their load, keep bursts in wall time, and are the same for a seed."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from trimtab.engine_bridge.capacity import offered_load
from trimtab.engine_bridge.engine_spec import EngineSpec, get_engine_spec
from trimtab.engine_bridge.errors import FlagError, TraceError
from trimtab.engine_bridge.trace import NO_SESSION, Trace
from trimtab.training.traces.balance import tier_shares
from trimtab.training.traces.compose import compose
from trimtab.training.traces.media_build import at_the_head
from trimtab.training.traces.options import ReadOptions
from trimtab.training.traces.part import Part
from trimtab.training.traces.part_files import PartChoices, read_parts
from trimtab.training.traces.supply import DrawnSessions, Redrawn, ShiftedCopies, Supply
from trimtab.training.whatif.variation import vary


@pytest.fixture(scope="module")
def spec() -> EngineSpec:
    return get_engine_spec("h100:llama-3.1-8b-tp1")


def _steady(n: int = 2000, span_s: float = 1000.0, seed: int = 0) -> Trace:
    rng = np.random.default_rng(seed)
    return Trace.build(
        arrival_s=np.sort(rng.uniform(0, span_s, n)),
        prompt_tokens=rng.integers(100, 3000, n),
        output_tokens=rng.integers(10, 300, n),
    )


def _sessions(count: int = 20, turns: int = 12) -> Trace:
    n = count * turns
    turn = np.tile(np.arange(turns, dtype=np.int32), count)
    session = np.repeat(np.arange(count, dtype=np.int32), turns)
    blocks = 4 * (turn + 1)
    place = np.concatenate([np.arange(b) for b in blocks])
    order = np.lexsort((session, turn))
    trace = Trace.build(
        arrival_s=np.sort(turn * 30.0),
        prompt_tokens=blocks * 64 + 10,
        output_tokens=np.full(n, 40),
        session=session,
        turn=turn,
        think_s=np.where(turn > 0, np.random.default_rng(1).exponential(29.0, n), 0.0),
        prefix_offsets=np.r_[0, np.cumsum(blocks)].astype(np.int64),
        prefix_ids=(np.repeat(session, blocks) * 4 * turns + place).astype(np.int32),
        prefix_block_tokens=np.full(n, 64, np.int32),
    )
    moved = trace.take(order)
    return Trace(**{**moved.__dict__, "arrival_s": trace.arrival_s})


def test_a_load_is_met_within_two_percent_and_split_by_shares(spec: EngineSpec) -> None:
    parts = [
        Part(name="a", tier="T0", trace=_steady()),
        Part(name="b", tier="T2", trace=_steady(500, seed=1)),
        Part(name="c", tier="T1", trace=_sessions(), drawn_starts=True),
    ]
    for load in (0.3, 0.9, 1.5):
        trace = compose(parts, load=load, spec=spec, rng=np.random.default_rng(1))
        trace.check()
        assert offered_load(trace, spec) == pytest.approx(load, rel=0.02)
        assert trace.tier_names == ("T0", "T1", "T2")
        assert trace.duration_s <= 1000


def test_equal_seeds_give_equal_traces(spec: EngineSpec) -> None:
    parts = [
        Part(name="a", tier="T0", trace=_steady()),
        Part(name="c", tier="T1", trace=_sessions(), drawn_starts=True),
    ]
    digests = [
        compose(parts, load=0.5, spec=spec, rng=np.random.default_rng(seed)).digest()
        for seed in (7, 7, 8)
    ]
    assert digests[0] == digests[1] != digests[2]


def test_without_a_load_the_recorded_rates_stay() -> None:
    trace = compose(
        [Part(name="a", tier="T3", trace=_steady())],
        load=None,
        spec=None,
        rng=np.random.default_rng(0),
    )
    assert len(trace) == 2000
    assert len(trace.tenant_names) == 8
    assert trace.tenant_names[0] == "T3-1"
    counts = np.bincount(trace.tenant)
    assert counts[0] > 2 * counts[-1]


def test_offsets_durations_and_tenants() -> None:
    part = Part(name="a", tier="T2", trace=_steady(), offset_s=300, tenants=3)
    rng = np.random.default_rng(0)
    trace = compose([part], load=None, spec=None, rng=rng, duration_s=2500)
    assert trace.arrival_s[0] >= 300
    # The record of 1000 s repeats until 2500 s.
    assert len(trace) == pytest.approx(2 * 2200, rel=0.02)
    assert trace.arrival_s[-1] < 2500
    assert len(trace.tenant_names) == 3
    with pytest.raises(FlagError, match="--offset"):
        compose([part], load=None, spec=None, rng=rng, duration_s=200)


def test_silence_and_bursts_survive_thinning() -> None:
    burst = np.r_[np.linspace(0, 1, 200), np.linspace(500, 501, 200)]
    n = len(burst)
    trace = Trace.build(arrival_s=burst, prompt_tokens=np.ones(n), output_tokens=np.ones(n))
    supply = ShiftedCopies("a", trace, duration_s=502, offset_s=0, seed=3)
    half = supply.take(0.5)
    assert 150 < len(half) < 250
    assert not np.any((half.arrival_s > 1) & (half.arrival_s < 500))


def test_more_contains_less() -> None:
    supply = ShiftedCopies("a", _steady(), duration_s=1000, offset_s=0, seed=3)
    some, more = supply.take(0.4), supply.take(2.3)
    assert len(more) == pytest.approx(2.3 * 2000, rel=0.02)
    assert set(some.arrival_s) <= set(more.arrival_s)


def test_copies_share_no_sessions_and_no_blocks() -> None:
    trace = ShiftedCopies("a", _sessions(), duration_s=400, offset_s=0, seed=3).take(2.0)
    once = ShiftedCopies("a", _sessions(), duration_s=400, offset_s=0, seed=3).take(1.0)
    assert len(np.unique(trace.session)) == 40
    assert len(np.unique(trace.prefix_ids)) > len(np.unique(once.prefix_ids))
    rows = np.repeat(np.arange(len(trace)), np.diff(trace.prefix_offsets))
    owner = np.full(int(trace.prefix_ids.max()) + 1, NO_SESSION)
    owner[trace.prefix_ids] = trace.session[rows]
    assert np.array_equal(owner[trace.prefix_ids], trace.session[rows])


def test_drawn_sessions_run_from_the_first_second_to_the_last() -> None:
    trace = DrawnSessions("a", _sessions(200), duration_s=600, offset_s=0, seed=1).take(1.0)
    trace.check()
    first = np.bincount((trace.arrival_s // 200).astype(np.int64))
    assert first.min() > 0.6 * first.max()
    for number in np.unique(trace.session):
        turns = trace.turn[trace.session == number]
        assert turns.tolist() == list(range(len(turns)))
    assert np.all(trace.think_s[trace.turn == 0] == 0)


def test_what_is_drawn_is_drawn_at_the_rate_asked_for() -> None:
    calls = []

    def redraw(factor: float, window_s: float) -> Trace:
        calls.append(factor)
        return _steady(int(1000 * factor), window_s)

    supply = Redrawn("a", redraw, duration_s=1000, offset_s=100, seed=0)
    assert len(supply.take(5.0)) == pytest.approx(5000, rel=0.05)
    assert len(supply.take(4.9)) == pytest.approx(4900, rel=0.05)
    assert len(supply.take(0.5)) == pytest.approx(500, rel=0.1)
    assert len(calls) == 2
    assert supply.take(0.5).arrival_s[0] >= 100


def test_a_batch_alone_is_spread_over_the_span_it_is_given(spec: EngineSpec) -> None:
    n = 400
    batch = Trace.build(
        arrival_s=np.zeros(n), prompt_tokens=np.full(n, 900), output_tokens=np.full(n, 90)
    )
    part = Part(name="v", tier="T2", trace=batch, offset_s=50)
    trace = compose([part], load=0.4, spec=spec, rng=np.random.default_rng(0), duration_s=600)
    assert set(trace.arrival_s) == {50.0}


def test_a_trace_too_light_for_the_load_is_refused(spec: EngineSpec) -> None:
    tiny = Trace.build(arrival_s=[0.0, 900.0], prompt_tokens=[1, 1], output_tokens=[1, 1])
    with pytest.raises(TraceError, match="too light"):
        compose(
            [Part(name="tiny", tier="T0", trace=tiny)],
            load=0.9,
            spec=spec,
            rng=np.random.default_rng(0),
        )


def test_a_record_too_short_to_repeat_is_refused() -> None:
    short = Trace.build(arrival_s=[0.0, 1e-3], prompt_tokens=[1, 1], output_tokens=[1, 1])
    part = Part(name="short", tier="T0", trace=short)
    with pytest.raises(TraceError, match=r"a record of 0\.001 s"):
        compose([part], load=None, spec=None, rng=np.random.default_rng(0), duration_s=1e6)


def test_shares() -> None:
    assert tier_shares(["T0", "T1", "T2", "T3"], {}) == pytest.approx(
        {"T0": 0.45, "T1": 0.25, "T2": 0.2, "T3": 0.1}
    )
    assert tier_shares(["T0", "T2"], {}) == pytest.approx({"T0": 9 / 13, "T2": 4 / 13})
    assert tier_shares(["T0", "T2"], {"T2": 0.9}) == pytest.approx({"T0": 0.1, "T2": 0.9})
    assert tier_shares(["gold", "tin"], {}) == {"gold": 0.5, "tin": 0.5}
    assert tier_shares(["T1"], {"T1": 1.0}) == {"T1": 1.0}


@pytest.mark.parametrize(
    "given", [{"T9": 0.5}, {"T0": 0.0}, {"T0": 1.5}, {"T0": 1.0}, {"T0": 0.6, "T2": 0.6}]
)
def test_shares_out_of_bounds(given: dict[str, float]) -> None:
    with pytest.raises(FlagError, match="--share"):
        tier_shares(["T0", "T2"], given)


def test_real_traces_together(shared_dir: Path, spec: EngineSpec) -> None:
    folder = shared_dir / "traces"
    words = [
        f"T0={folder}/azure-2023/AzureLLMInferenceTrace_conv.csv.gz",
        f"T2={folder}/azure-2023/AzureLLMInferenceTrace_code.csv.gz",
        f"T2={folder}/vidur/splitwise_code.csv.gz",
        f"T3={folder}/servegen/data/language/m-small/chunk-0-trace.csv.gz",
    ]
    if not (folder / "servegen/data/language/m-small/chunk-0-trace.csv.gz").exists():
        words[3] = f"T3={folder}/servegen/data/language/m-small"
    rng = np.random.default_rng(5)
    parts = read_parts(words, PartChoices(), rng=rng, options=ReadOptions())
    trace = compose(parts, load=0.9, spec=spec, rng=rng)
    assert offered_load(trace, spec) == pytest.approx(0.9, rel=0.02)
    assert trace.tier_names == ("T0", "T2", "T3")
    assert trace.duration_s == pytest.approx(2280, abs=5)
    code = trace.arrival_s[trace.tier == 1]
    assert np.diff(code).std() / np.diff(code).mean() > 4


def _showing(trace: Trace, seed: int = 0) -> Trace:
    """The trace with up to two items a prompt, of which the tokens tell the row they belong to."""
    rng = np.random.default_rng(seed)
    counts = rng.integers(0, 3, len(trace))
    owner = np.repeat(np.arange(len(trace)), counts)
    tokens = 1 + trace.prompt_tokens[owner] // 3
    return replace(
        trace, media=at_the_head(counts, rng.integers(0, 3, len(owner)), tokens.astype(np.int64))
    )


def _of_each(trace: Trace) -> Counter[tuple[int, int, tuple[tuple[int, int, int], ...]]]:
    media = trace.media
    found: Counter[tuple[int, int, tuple[tuple[int, int, int], ...]]] = Counter()
    for row in range(len(trace)):
        inside = slice(media.offsets[row], media.offsets[row + 1])
        columns = (media.kind[inside], media.start_tokens[inside], media.tokens[inside])
        items = tuple(zip(*(column.tolist() for column in columns), strict=True))
        found[int(trace.prompt_tokens[row]), int(trace.output_tokens[row]), items] += 1
    return found


@pytest.mark.parametrize("kind", [ShiftedCopies, DrawnSessions])
def test_copies_keep_their_media_and_show_other_things(kind: type[Supply]) -> None:
    trace = _showing(_steady(200))
    supply = kind("x", trace, duration_s=1000.0, offset_s=0.0, seed=3)  # type: ignore[call-arg]
    more = supply.take(2.5)
    own, copied = _of_each(trace), _of_each(more)
    assert len(more) > 400
    assert set(copied) <= set(own)
    # A content is one row's of the original, in as many copies as show other things.
    assert len(np.unique(more.media.content)) == len(more.media)
    assert more.media.content.max() == len(more.media) - 1


def test_composed_parts_keep_their_media(spec: EngineSpec) -> None:
    shown, plain = _showing(_steady(400)), _steady(300, seed=1)
    parts = [Part(name="a", tier="T0", trace=shown), Part(name="b", tier="T2", trace=plain)]
    trace = compose(parts, load=0.4, spec=spec, rng=np.random.default_rng(1))
    trace.check()
    with_media = np.diff(trace.media.offsets) > 0
    assert with_media.any()
    assert not with_media[trace.tier == 1].any()
    assert set(_of_each(trace.take(np.flatnonzero(trace.tier == 0)))) <= set(_of_each(shown))


@pytest.mark.parametrize("seed", [1, 2])
def test_a_seed_moves_requests_with_their_media(seed: int) -> None:
    trace = _showing(_steady(300))
    assert _of_each(vary(trace, seed)) == _of_each(trace)

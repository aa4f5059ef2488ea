"""Synthetic traffic: the load asked for, the incidents promised, sessions that hold together."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from trimtab.engine_bridge.capacity import offered_load
from trimtab.engine_bridge.engine_spec import get_engine_spec
from trimtab.engine_bridge.errors import FlagError
from trimtab.engine_bridge.trace import Trace
from trimtab.training.traces.arrivals import day_curve, markov_bursts, regimes, renewals
from trimtab.training.traces.describe import describe
from trimtab.training.traces.generate import DEFAULT_ENGINE, PRESETS, demo_trace, generate


@pytest.fixture(scope="module")
def demo() -> Trace:
    return demo_trace(0)


def test_the_demo_is_an_hour_at_85_to_90_percent(demo: Trace) -> None:
    assert 0.85 < offered_load(demo, get_engine_spec(DEFAULT_ENGINE)) < 0.90
    assert 3500 < demo.duration_s < 3600
    assert demo.tier_names == ("T0", "T1", "T2", "T3")
    assert demo_trace(0).digest() == demo.digest()
    assert demo_trace(1).digest() != demo.digest()


def test_the_demo_shows_its_incidents(demo: Trace) -> None:
    batch = demo.arrival_s[demo.tier == 2]
    wave = np.count_nonzero((batch > 0.22 * 3600) & (batch < 0.22 * 3600 + 45))
    assert wave > 10 * len(batch) * 45 / 3600
    free = np.bincount((demo.arrival_s[demo.tier == 3] // 300).astype(np.int64))
    assert free.max() > 4 * np.median(free)
    assert np.count_nonzero(demo.prompt_tokens > 90_000) == 2


def test_the_demo_has_chats_and_agents_with_prefixes(demo: Trace) -> None:
    found = describe(demo)["tiers"]
    assert found["T0"]["reusable_prompt_share"] > 0.7
    assert found["T1"]["reusable_prompt_share"] > 0.85
    assert found["T1"]["sessions"] > 10
    assert found["T2"]["sessions"] == found["T3"]["sessions"] == 0
    assert describe(demo)["stop_reasons"]["tool_use"] > 100


def test_ids_name_full_blocks_only(demo: Trace) -> None:
    named = np.diff(demo.prefix_offsets) * demo.prefix_block_tokens
    assert np.all(named <= demo.prompt_tokens + demo.output_tokens)


def test_prompts_of_a_session_repeat_what_was_said(demo: Trace) -> None:
    rows = np.flatnonzero(demo.tier == 1)
    number = demo.session[rows][np.argmax(demo.turn[rows] == 6)]
    turns = rows[demo.session[rows] == number]
    for before, after in itertools.pairwise(turns):
        old = demo.prefix_ids[demo.prefix_offsets[before] : demo.prefix_offsets[before + 1]]
        new = demo.prefix_ids[demo.prefix_offsets[after] : demo.prefix_offsets[after + 1]]
        assert np.array_equal(new[: len(old)], old)
        said = demo.prompt_tokens[before] + demo.output_tokens[before]
        assert demo.prompt_tokens[after] > said
        assert len(old) == said // 64


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_hits_its_load(preset: str) -> None:
    spec = get_engine_spec("h100:llama-3.1-70b-tp8")
    trace = generate(hours=0.25, seed=3, preset=preset, load=1.1, spec=spec)
    trace.check()
    assert offered_load(trace, spec) == pytest.approx(1.1, rel=0.02)
    assert preset in trace.notes[0]


def test_a_day_rises_and_falls() -> None:
    day = day_curve(2 * 86_400, 0.6)
    assert day.mean() == pytest.approx(1)
    assert day.argmin() == 0
    assert day.argmax() in (12 * 3600, 36 * 3600)
    assert day.max() / day.min() == pytest.approx(4)


@pytest.mark.parametrize(
    ("flag", "arguments"),
    [
        ("--hours", {"hours": 0.0}),
        ("--hours", {"hours": 1000.0}),
        ("--hours", {"hours": float("nan")}),
        ("--preset", {"hours": 1.0, "preset": "wave"}),
        ("--load", {"hours": 1.0, "load": 0.0, "spec": get_engine_spec(DEFAULT_ENGINE)}),
    ],
)
def test_arguments_out_of_bounds(flag: str, arguments: dict[str, object]) -> None:
    with pytest.raises(FlagError, match=flag):
        generate(seed=0, **arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize("cv", [0.5, 1.0, 3.0])
def test_renewals_meet_rate_and_burstiness(cv: float) -> None:
    times = renewals(np.full(4000, 5.0), np.random.default_rng(1), cv=cv)
    assert len(times) == pytest.approx(20_000, rel=0.07)
    gaps = np.diff(times)
    assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=0.1)
    assert times.min() >= 0
    assert times.max() <= 4000


def test_renewals_leave_silence_alone() -> None:
    rate = np.r_[np.full(100, 5.0), np.zeros(100), np.full(100, 5.0), np.zeros(50)]
    times = renewals(rate, np.random.default_rng(2), cv=2.0)
    assert len(times) > 700
    assert not np.any((times > 100) & (times < 200))
    assert not np.any(times > 300)
    assert len(renewals(np.zeros(5), np.random.default_rng(0))) == 0


def test_bursts_and_regimes_have_the_shape_asked_for() -> None:
    rng = np.random.default_rng(0)
    bursts = markov_bursts(100_000, rng, factor=5, calm_s=90, burst_s=25)
    assert bursts.mean() == pytest.approx(1, abs=0.05)
    assert set(np.round(np.unique(bursts) / bursts.min(), 6)) == {1, 5}
    mix = regimes(10_000, rng, levels=(0, 1, 2), mean_s=500)
    changes = np.count_nonzero(np.diff(mix))
    assert 14 < changes < 30


def test_media_come_on_top_of_the_same_texts() -> None:
    plain = generate(hours=0.3, seed=5, preset="steady")
    shown = generate(hours=0.3, seed=5, preset="steady", media_share=0.3)
    assert len(plain.media) == 0
    tiers = shown.tier[shown.media.request]
    assert {shown.tier_names[number] for number in set(tiers)} == {"T0", "T1"}
    # Turns after a session's first one: that may hold what was shown before the trace began.
    order = np.lexsort((shown.turn, shown.session))
    held = np.diff(shown.media.offsets)[order]
    later = (shown.turn[order] > 0)[1:]
    assert (np.diff(held)[later] > 0).mean() == pytest.approx(0.3, abs=0.03)
    singles = plain.session == -1
    assert np.array_equal(plain.prompt_tokens[singles], shown.prompt_tokens[shown.session == -1])


def test_a_conversation_carries_its_media_at_their_place() -> None:
    trace = generate(hours=0.3, seed=5, preset="steady", media_share=0.5)
    media = trace.media
    seen: dict[int, list[tuple[int, int, int, int]]] = {}
    grown = 0
    for row in range(len(trace)):
        inside = slice(media.offsets[row], media.offsets[row + 1])
        items = list(
            zip(
                media.kind[inside].tolist(),
                media.start_tokens[inside].tolist(),
                media.tokens[inside].tolist(),
                media.content[inside].tolist(),
                strict=True,
            )
        )
        session = int(trace.session[row])
        if session < 0:
            assert not items
            continue
        before = seen.get(session, [])
        assert items[: len(before)] == before
        if session in seen:
            grown += len(items) > len(before)
        for _, start, tokens, _ in items[len(before) :]:
            assert start + tokens <= trace.prompt_tokens[row]
        seen[session] = items
    assert grown > 20
    owners: dict[int, int] = {}
    for session, items in seen.items():
        for item in items:
            assert owners.setdefault(item[3], session) == session


def test_a_share_of_media_that_is_none() -> None:
    with pytest.raises(FlagError, match="--media-share"):
        generate(hours=0.1, seed=0, media_share=1.5)

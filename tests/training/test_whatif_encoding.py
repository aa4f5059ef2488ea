"""An encoder for a what-if: flags onto the engine, and what is told of a run."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from tests.engine_bridge.replay.workloads import random_trace, with_media
from trimtab.agents.registry import make_policy
from trimtab.engine_bridge.encoder_spec import EncoderSpec
from trimtab.engine_bridge.engine_spec import get_engine_spec
from trimtab.engine_bridge.errors import FlagError
from trimtab.engine_bridge.plan import load_plan, with_values
from trimtab.training.report.page import render
from trimtab.training.whatif.encoding import encoder_notes, with_encoder
from trimtab.training.whatif.run import Contender, Study, drive, run_study

SPEC = get_engine_spec("h100:llama-3.1-8b-tp1")
PLAN = load_plan()
TRACE = with_media(random_trace(5, requests=40), 5)


def test_flags_make_an_encoder_or_change_the_file_s() -> None:
    made = with_encoder(SPEC, image_us=50.0, audio_us=None, video_us=7.0)
    assert made.encoder == EncoderSpec(kinds=((0.0, 50.0, 0.0), (0.0, 0.0, 0.0), (0.0, 7.0, 0.0)))
    own = replace(SPEC, encoder=EncoderSpec(cache_tokens=900, kinds=((1.0, 2.0, 3.0),) * 3))
    changed = with_encoder(own, image_us=50.0, audio_us=None, video_us=None).encoder
    assert changed is not None
    assert changed.cache_tokens == 900
    assert changed.kinds == ((1.0, 50.0, 3.0), (1.0, 2.0, 3.0), (1.0, 2.0, 3.0))
    assert with_encoder(own, image_us=None, audio_us=None, video_us=None) is own


def test_a_bad_flag_is_named() -> None:
    with pytest.raises(FlagError, match=r"--audio-us.*-1"):
        with_encoder(SPEC, image_us=None, audio_us=-1.0, video_us=None)


def test_media_and_encode_time_are_told_by_tier_and_the_money_adds_up() -> None:
    spec = with_encoder(SPEC, image_us=300.0, audio_us=300.0, video_us=300.0)
    contenders = tuple(
        Contender(label=name, policy=name, plan=PLAN) for name in ("static", "stock-fcfs")
    )
    study = Study(trace=TRACE, plan=PLAN, contenders=contenders, spec=spec, drain_s=60.0)
    outcome = run_study(study, processes=1)
    for run in outcome.result.results:
        assert run.media is not None
        shown = sum(media.media_tokens for media in run.media.values())
        assert shown == TRACE.media.tokens.sum()
        assert all(media.encode_ms >= 0.0 for media in run.media.values())
        assert 0.0 < sum(media.encode_ms for media in run.media.values()) <= 0.3 * shown
        parts = [account.cost_usd for account in run.economics.tiers.values()]
        assert sum(parts) == pytest.approx(run.economics.engine.cost_usd)
    told = json.loads(outcome.result.to_json())
    assert told["encoder"]["kinds"][0] == [0.0, 300.0, 0.0]
    assert set(told["results"][0]["media"]["T0"]) == {"media_tokens", "encode_ms"}
    assert not outcome.result.trace.notes
    assert "Media tokens of its prompts" in render(outcome)


def test_an_engine_without_an_encoder_says_that_it_counts_none() -> None:
    study = Study(
        trace=TRACE,
        plan=PLAN,
        contenders=(Contender(label="static", policy="static", plan=PLAN),),
        spec=SPEC,
        drain_s=60.0,
    )
    result = run_study(study, processes=1).result
    assert "no encoder section" in result.trace.notes[-1]
    (run,) = result.results
    assert run.media is not None
    assert sum(media.encode_ms for media in run.media.values()) == 0.0
    plain = run_study(replace(study, trace=random_trace(5, requests=40)), processes=1).result
    assert not plain.trace.notes
    assert plain.results[0].media is None
    assert encoder_notes(random_trace(5), SPEC) == ()


def test_prompts_with_media_stay_whole_where_long_ones_go_in_slices() -> None:
    plan = with_values(PLAN, {f"tiers.{name}.slice_tokens": 1024 for name in PLAN.tiers})
    spec = with_encoder(SPEC, image_us=100.0, audio_us=100.0, video_us=100.0)
    trace = replace(TRACE, cancel_after_s=np.full(len(TRACE), np.inf))
    result = drive(trace, make_policy("static"), plan, spec, seed=0, drain_s=60.0)
    assert len(result.encode_ms) == len(trace)
    shows = np.diff(trace.media.offsets) > 0
    assert not result.encode_ms[~shows].any()
    assert result.encode_ms[shows].any()

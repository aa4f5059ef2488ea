"""Summaries say what the trace's readme says."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from trimtab.engine_bridge.media import AUDIO, IMAGE, MediaItems
from trimtab.engine_bridge.trace import Trace
from trimtab.training.traces.describe import describe


def test_figures_of_a_small_trace() -> None:
    trace = _small()
    found = describe(trace)
    assert found["rows"] == 4
    assert found["span_s"] == 131
    assert found["silent_minutes"] == 1
    assert found["prompt_tokens"]["total"] == 664
    assert found["tiers"]["T0"]["rows"] == 2
    # Row 1 finds row 0's block, row 3 finds row 1's second one too.
    assert found["reusable_prompt_share"] == pytest.approx((64 + 64) / 664, abs=1e-4)
    json.dumps(found, allow_nan=False)


def _small() -> Trace:
    return Trace.build(
        arrival_s=[0.0, 10.0, 130.0, 131.0],
        prompt_tokens=[100, 200, 300, 64],
        output_tokens=[1, 2, 3, 4],
        tier=[0, 0, 1, 1],
        tier_names=("T0", "T1"),
        prefix_offsets=np.array([0, 1, 3, 3, 4], np.int64),
        prefix_ids=np.array([0, 0, 1, 0], np.int32),
        prefix_block_tokens=np.array([64, 64, 0, 64], np.int32),
    )


def test_one_row_has_no_rate() -> None:
    found = describe(Trace.build(arrival_s=[3.0], prompt_tokens=[1], output_tokens=[1]))
    assert found["rate_per_s"] is None
    assert found["cv"] is None


def test_media_by_kind_and_tier() -> None:
    media = MediaItems(
        offsets=np.array([0, 2, 2, 3, 3], np.int64),
        kind=np.array([IMAGE, AUDIO, IMAGE], np.int32),
        start_tokens=np.array([0, 50, 7], np.int32),
        tokens=np.array([50, 10, 90], np.int32),
        content=np.array([3, 4, 3], np.int32),
    )
    found = describe(replace(_small(), media=media))
    assert found["media"]["items"] == 3
    assert found["media"]["distinct"] == 2
    assert found["media"]["requests"] == 2
    assert found["media"]["kinds"]["image"] == {"items": 2, "tokens": 140}
    assert found["media"]["prompt_share"] == pytest.approx(150 / 664, abs=1e-4)
    assert found["tiers"]["T0"]["media"]["kinds"]["audio"] == {"items": 1, "tokens": 10}
    assert found["tiers"]["T1"]["media"]["kinds"]["audio"] == {"items": 0, "tokens": 0}
    assert describe(_small())["media"]["prompt_share"] == 0

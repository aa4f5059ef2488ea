"""Case 1 on the real engine: a long prompt must not hold up short ones, nor be starved."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("vllm", reason="runs vLLM's own scheduler")

from tests.cases.real_vllm.serving import serve
from tests.cases.replaying import engine_spec
from tests.cases.test_long_prefill import (
    LONG_ARRIVES_S,
    OTHERS,
    PUBLISHED,
    Run,
    Setting,
    expect_a_steady_pace,
    expect_no_starvation,
    expect_shorts_to_go_on,
    expect_shorts_to_wait,
)
from trimtab.engine_bridge.replay.engine import RuleSet

SETTINGS = [
    setting if setting.budget == 512 else replace(setting, end_s=26.0)
    for setting in PUBLISHED + OTHERS
]
"""As long as it takes to see the long prompt through and some time after it."""


def run(setting: Setting, rules: RuleSet) -> Run:
    trace, tiers = setting.trace(), 4
    got = serve(trace, engine_spec(max_num_batched_tokens=setting.budget), rules)
    long = int(np.argmax(trace.prompt_tokens))
    first_s = got.requests["first_token_s"][long]
    seen = [
        (step, chunks)
        for step, chunks in zip(got.steps, got.chunks, strict=True)
        if step.start_s >= LONG_ARRIVES_S and step.end_s <= first_s
    ]
    prefills, decodes = np.zeros((2, len(seen), tiers), np.int64)
    for at, (step, chunks) in enumerate(seen):
        for row, tokens in step.tokens.items():
            kind = prefills if row in chunks else decodes
            kind[at, trace.tier[row]] += tokens
    return Run(
        result=got,
        end_s=np.array([step.end_s for step, _ in seen]),
        step_ms=np.array([1e3 * (step.end_s - step.start_s) for step, _ in seen]),
        prefill_tokens=prefills,
        decode_tokens=decodes,
        long=long,
    )


@pytest.mark.parametrize("rules", ["fcfs", "priority"])
@pytest.mark.parametrize("setting", SETTINGS[:3], ids=lambda s: str(s.budget))
def test_stock_rules_make_shorts_wait_for_the_whole_long_prompt(
    setting: Setting, rules: RuleSet
) -> None:
    expect_shorts_to_wait(setting, run(setting, rules))


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_shorts_go_on_at_a_steady_pace_beside_a_long_prompt(setting: Setting) -> None:
    got = run(setting, "fair")
    expect_shorts_to_go_on(setting, got)
    expect_a_steady_pace(setting, got)


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_the_long_prompt_is_not_starved_and_no_tokens_are_lost(setting: Setting) -> None:
    expect_no_starvation(setting, serve)

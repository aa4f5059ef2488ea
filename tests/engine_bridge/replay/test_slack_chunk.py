"""Rule 13: prefill is cut so that protected token deadlines hold, even as the engine drifts."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from tests.engine_bridge.replay.workloads import TIERS
from trimtab.engine_bridge.engine_spec import get_engine_spec
from trimtab.engine_bridge.plan import Plan, load_plan, with_values
from trimtab.engine_bridge.replay.engine import ReplayEngine
from trimtab.engine_bridge.trace import Trace

PLAN = load_plan()
SPEC = get_engine_spec("h100:llama-3.1-8b-tp1")
TARGET_MS = 40.0


def chat_tpot_ms(plan: Plan, *, speed: float = 1.0) -> npt.NDArray[np.float64]:
    """T0 chats that decode while long T1 prompts keep coming in."""
    chats = [(0.2 * k, 0, 300, 200) for k in range(40)]
    rows = sorted(chats + [(0.5 * k, 1, 20_000, 20) for k in range(16)])
    arrival, tier, prompt, output = zip(*rows, strict=True)
    trace = Trace.build(
        arrival_s=arrival,
        tier=tier,
        prompt_tokens=prompt,
        output_tokens=output,
        tier_names=TIERS,
    )
    engine = ReplayEngine(trace, plan, SPEC, speed=speed)
    engine.run(interval_s=1.0)
    q = engine.result().requests
    mine = q["tier"] == 0
    return (q["last_token_s"][mine] - q["first_token_s"][mine]) * 1e3 / 199


def test_the_target_is_the_shipped_plan_s() -> None:
    assert PLAN.tiers["T0"].targets.tpot_ms == TARGET_MS


def test_protected_answers_keep_their_pace_only_with_the_rule() -> None:
    off = with_values(PLAN, {"rules.slack_chunk": False})
    assert chat_tpot_ms(PLAN).max() <= TARGET_MS
    assert np.quantile(chat_tpot_ms(off), 0.9) > TARGET_MS


def test_the_rule_follows_an_engine_that_has_slowed_down() -> None:
    assert np.quantile(chat_tpot_ms(PLAN, speed=1.33), 0.9) <= TARGET_MS

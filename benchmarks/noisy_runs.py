"""Runs of `noisy_neighbour`: on the replay, and on vLLM's own scheduler in virtual time.

Both give the same columns, one value a request of the trace; it judges nothing.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final, cast

import numpy as np
import numpy.typing as npt
from noisy_traffic import QUIET, Door, Floats, admitted

from trimtab.engine_bridge.engine_spec import EngineSpec
from trimtab.engine_bridge.plan import Plan
from trimtab.engine_bridge.replay.engine import ReplayEngine, RuleSet
from trimtab.engine_bridge.rules.budget import predicted_step_ms
from trimtab.engine_bridge.trace import Trace

FINISHED: Final = 1
PARTS: Final = ("running_step", "queue", "own_prompt", "decodes_beside", "chunks_beside")
"""Where a first token's time goes: the step that runs when it comes, the queue after that, its own
prompt on an idle engine, and what the decodes and others' prefill add to its steps."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """One run of a trace; what the door refused has NaN times."""

    trace: Trace
    first_s: Floats
    last_s: Floats
    """Only of what finished."""
    busy_s: float
    end_s: float

    @property
    def ttft_ms(self) -> Floats:
        """Time to first token, (n,)."""
        wait: Floats = (self.first_s - self.trace.arrival_s) * 1e3
        return wait

    @property
    def tpot_ms(self) -> Floats:
        """Time per output token after the first, (n,)."""
        each: Floats = (
            (self.last_s - self.first_s) * 1e3 / np.maximum(1, self.trace.output_tokens - 1)
        )
        return each

    def of(self, tenant: int) -> npt.NDArray[np.bool_]:
        """A tenant's rows, (n,)."""
        rows: npt.NDArray[np.bool_] = self.trace.tenant == tenant
        return rows


def replay(
    trace: Trace, plan: Plan, spec: EngineSpec, rules: RuleSet, quota: Mapping[str, object]
) -> Run:
    """To its end on the replay. The quota must be one of rates."""
    passed = admitted(trace, quota, plan) if quota else np.ones(len(trace), np.bool_)
    engine = ReplayEngine(trace.take(np.flatnonzero(passed)), plan, spec, rules=rules)
    engine.run(interval_s=60.0)
    result = engine.result()
    first, last = np.full((2, len(trace)), np.nan)
    first[passed] = result.requests["first_token_s"]
    last[passed] = np.where(
        result.requests["outcome"] == FINISHED, result.requests["last_token_s"], np.nan
    )
    return Run(
        trace=trace, first_s=first, last_s=last, busy_s=result.engine_busy_s, end_s=result.end_s
    )


def on_vllm(
    trace: Trace, plan: Plan, spec: EngineSpec, rules: RuleSet, quota: Mapping[str, object]
) -> Run:
    """To its end on vLLM's own scheduler and KV cache manager, in virtual time."""
    # vLLM looks for a device when it is first imported; this needs none.
    os.environ.setdefault("VLLM_TARGET_DEVICE", "cpu")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    from trimtab.engine_bridge.vllm.scheduler import FairScheduler
    from trimtab.engine_bridge.vllm.virtual_time import VirtualClock

    with TemporaryDirectory() as folder:
        path = Path(folder) / "plan.yaml"
        path.write_text(plan.model_dump_json())
        chosen: dict[str, Any] = {"policy": rules}
        if rules == "fair":
            chosen = {
                "policy": "priority",
                "scheduler_class": FairScheduler,
                "prepare": lambda made, now: cast(Any, made).use_clock(VirtualClock(now)),
            }
        settings = {"trimtab": {"engine": spec.name, "plan": str(path)}}
        door = Door(quota, plan) if quota else None
        engine = _noting_engine(door, trace, plan, spec, additional_config=settings, **chosen)
        while (step := engine.step()) is not None:
            engine.busy_s += step.end_s - step.start_s
    return Run(
        trace=trace,
        first_s=engine.first_s,
        last_s=engine.last_s,
        busy_s=engine.busy_s,
        end_s=engine.now_s,
    )


def _noting_engine(
    door: Door | None, trace: Trace, plan: Plan, spec: EngineSpec, **chosen: Any
) -> Any:
    """A real scheduler that notes each request's times; vLLM is imported only here."""
    from trimtab.engine_bridge.vllm.virtual_time import VirtualVllm

    class Engine(VirtualVllm):
        """Notes each request's times; a door may stand before it."""

        first_s = np.full(len(trace), np.nan)
        last_s = np.full(len(trace), np.nan)
        tokens = np.zeros(len(trace), np.int64)
        busy_s = 0.0

        def _arrive(self, row: int, at_s: float) -> None:
            if door is not None and not door.admit(trace, row, at_s):
                self.left -= 1
                return
            super()._arrive(row, at_s)

        def _sample(self, name: str, drafts: int) -> list[int]:
            sampled = super()._sample(name, drafts)
            row = int(name)
            if sampled and not self.tokens[row]:
                self.first_s[row] = self.now_s
            self.tokens[row] += len(sampled)
            return sampled

        def _ended(self, row: int) -> None:
            if self.tokens[row] == trace.output_tokens[row]:
                self.last_s[row] = self.now_s
            if door is not None:
                door.ended(trace, row, self.now_s)
            super()._ended(row)

    return Engine(trace, plan, spec, **chosen)


def decompose(
    trace: Trace, plan: Plan, spec: EngineSpec, rules: RuleSet, *, worst: float
) -> dict[str, float]:
    """Where the time of the quiet tenant's worst first tokens goes, on the replay step by step.

    Args:
        trace: The traffic; all of it is let in.
        plan: The plan.
        spec: The engine.
        rules: The rule set.
        worst: The part of the quiet tenant's requests that is looked at.

    Returns:
        Mean milliseconds by part (`PARTS`), and their sum as `ttft_ms`.
    """
    engine = ReplayEngine(trace, plan, spec, rules=rules, record_steps=True)
    quiet = trace.tenant == QUIET
    computed = np.zeros(len(trace), np.int64)
    found = np.zeros((len(trace), len(PARTS)))
    start_s = 0.0
    while step := engine.step():
        end_s = engine.now_s
        due = np.searchsorted(trace.arrival_s, [start_s, end_s], side="right")
        fresh = np.arange(*due)
        # What arrives in an idle engine finds no step that runs.
        found[fresh, 0] = (end_s - trace.arrival_s[fresh]) * 1e3
        _note_step(trace, spec, step, computed, found, quiet)
        start_s = end_s
    result = engine.result().requests
    ttft = (result["first_token_s"] - result["arrival_s"]) * 1e3
    rest = found[:, 2:].sum(axis=1)
    found[:, 0] = np.clip(np.minimum(found[:, 0], ttft - rest), 0.0, None)
    found[:, 1] = ttft - rest - found[:, 0]
    rows = np.flatnonzero(quiet)
    rows = rows[np.argsort(-ttft[rows])][: max(1, round(worst * len(rows)))]
    means = dict(zip(PARTS, found[rows].mean(axis=0).tolist(), strict=True))
    return means | {"ttft_ms": float(ttft[rows].mean())}


def _note_step(
    trace: Trace,
    spec: EngineSpec,
    step: dict[int, int],
    computed: npt.NDArray[np.int64],
    found: Floats,
    quiet: npt.NDArray[np.bool_],
) -> None:
    """Split one step's time among the causes for each quiet prompt that it computes."""
    rows = np.fromiter(step, np.int64, len(step))
    tokens = np.fromiter(step.values(), np.int64, len(step))
    prefill = computed[rows] < trace.prompt_tokens[rows]
    decodes = rows[~prefill]
    read = float(computed[decodes].sum())
    chunk_pairs = tokens * (computed[rows] + 0.5 * tokens)
    for at in np.flatnonzero(prefill & quiet[rows]):
        row, own = rows[at], float(tokens[at])
        alone = predicted_step_ms(spec.coef, 0.0, 0.0, 1.0, own, float(chunk_pairs[at]))
        beside = predicted_step_ms(
            spec.coef, float(len(decodes)), read, 1.0, own, float(chunk_pairs[at])
        )
        whole = predicted_step_ms(
            spec.coef,
            float(len(decodes)),
            read,
            float(prefill.sum()),
            float(tokens[prefill].sum()),
            float(chunk_pairs[prefill].sum()),
        )
        found[row, 2:] += (alone, beside - alone, whole - beside)
    computed[rows] += tokens

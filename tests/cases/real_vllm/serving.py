"""Runs a trace through a real vLLM scheduler in virtual time and notes what the cases look at.

It is a stand-in for `replaying.replay`: the same columns, from vLLM's own requests. It needs vLLM.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tests.cases.replaying import Columns
from trimtab.engine_bridge.engine_spec import EngineSpec
from trimtab.engine_bridge.plan import Plan, load_plan
from trimtab.engine_bridge.replay.engine import RuleSet
from trimtab.engine_bridge.trace import Trace
from trimtab.engine_bridge.vllm.virtual_record import RecordedVllm
from trimtab.engine_bridge.vllm.virtual_time import Step


@dataclass(frozen=True)
class Served:
    """A run on the real engine; `requests` has the replay's columns."""

    requests: Columns
    end_s: float
    engine_busy_s: float
    steps: list[Step]
    chunks: list[dict[int, int]]
    """By step, the prefill tokens of each row that computes its prompt."""


class Engine(RecordedVllm):
    """`RecordedVllm` with what a case leaves out: the fair rules, the shipped plan."""

    def __init__(
        self,
        trace: Trace,
        spec: EngineSpec,
        rules: RuleSet = "fair",
        plan: Plan | None = None,
        **speculation: Any,
    ) -> None:
        """Set it up before the first arrival."""
        super().__init__(trace, spec, rules, plan or load_plan(), **speculation)


def serve(
    trace: Trace, spec: EngineSpec, rules: RuleSet = "fair", *, plan: Plan | None = None
) -> Served:
    """Run a trace to its end."""
    engine = Engine(trace, spec, rules, plan)
    steps, chunks = [], []
    while (step := engine.step()) is not None:
        steps.append(step)
        chunks.append(engine.chunks)
    return Served(engine.requests(), engine.now_s, engine.busy_s, steps, chunks)

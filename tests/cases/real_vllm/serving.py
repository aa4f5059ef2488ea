"""Runs a trace through a real vLLM scheduler in virtual time and notes what the cases look at.

It is a stand-in for `replaying.replay`: the same columns, from vLLM's own requests. It needs vLLM.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any, Final

import numpy as np
from vllm.v1.request import Request, RequestStatus

from tests.cases.replaying import CANCELLED, FINISHED, REFUSED, SHED, Columns
from trimtab.engine_bridge.engine_spec import EngineSpec
from trimtab.engine_bridge.plan import Plan, load_plan
from trimtab.engine_bridge.replay.engine import RuleSet
from trimtab.engine_bridge.trace import Trace
from trimtab.engine_bridge.vllm.scheduler import FairScheduler
from trimtab.engine_bridge.vllm.virtual_time import Step, VirtualClock, VirtualVllm

_OUTCOMES: Final = {
    RequestStatus.FINISHED_LENGTH_CAPPED: FINISHED,
    RequestStatus.FINISHED_ERROR: SHED,
    RequestStatus.FINISHED_ABORTED: CANCELLED,
}


@dataclass(frozen=True)
class Served:
    """A run on the real engine; `requests` has the replay's columns."""

    requests: Columns
    end_s: float
    engine_busy_s: float
    steps: list[Step]
    chunks: list[dict[int, int]]
    """By step, the prefill tokens of each row that computes its prompt."""


class Engine(VirtualVllm):
    """`VirtualVllm` under stock rules or the fair ones; notes each request's times."""

    def __init__(
        self,
        trace: Trace,
        spec: EngineSpec,
        rules: RuleSet = "fair",
        plan: Plan | None = None,
        **speculation: Any,
    ) -> None:
        """Set it up before the first arrival; `plan` is the shipped one unless said.

        `speculation` is `draft_tokens` and `accepts` of `VirtualVllm`.
        """
        plan = plan or load_plan()
        fair = rules == "fair"
        super().__init__(
            trace,
            plan,
            spec,
            **({"scheduler_class": FairScheduler, "prepare": _use_virtual_time} if fair else {}),
            policy="priority" if fair else rules,
            additional_config={"trimtab": {"engine": spec.name, "plan": _plan_file(plan)}},
            **speculation,
        )
        count = len(trace)
        self.seen: dict[int, Request] = {}
        self.admitted_s, self.first_s, self.last_s = np.full((3, count), np.nan)
        self.generated, self.cached = np.zeros((2, count), np.int64)
        self.computed, self.recomputed = np.zeros((2, count), np.int64)
        self.chunks: dict[int, int] = {}
        self.busy_s = 0.0

    @property
    def trace(self) -> Trace:
        """The traffic."""
        return self._trace

    def _arrive(self, row: int, at_s: float) -> None:
        super()._arrive(row, at_s)
        request = self.scheduler.requests.get(f"{row:09d}")
        if request is not None:
            self.seen[row] = request

    def _model_ms(self, scheduled: Mapping[str, int]) -> float:
        self.chunks = {
            int(name): tokens
            for name, tokens in scheduled.items()
            if self._token_since.get(name) != self.scheduler.requests[name].num_preemptions
        }
        return super()._model_ms(scheduled)

    def _sample(self, name: str, drafts: int) -> list[int]:
        tokens = super()._sample(name, drafts)
        if tokens:
            row = int(name)
            if self.generated[row] == 0:
                self.first_s[row] = self.now_s
            self.last_s[row] = self.now_s
            self.generated[row] += len(tokens)
        return tokens

    def step(self) -> Step | None:
        """Run the next step that carries anything, and note whom it served."""
        done = super().step()
        if done is None:
            return None
        self.busy_s += done.end_s - done.start_s
        for row, tokens in done.tokens.items():
            to = self.seen[row].num_computed_tokens
            if np.isnan(self.admitted_s[row]):
                self.admitted_s[row] = done.start_s
                self.cached[row] = to - tokens
            self.recomputed[row] += max(0, min(to, int(self.computed[row])) - (to - tokens))
            self.computed[row] = max(to, self.computed[row])
        return done

    def advance(self, until_s: float) -> None:
        """Run steps until that time or the end."""
        while self.left > 0 and self.now_s < until_s and self.step() is not None:
            pass

    def requests(self) -> Columns:
        """The replay's columns of all requests."""
        trace, count = self._trace, len(self._trace)
        columns: dict[str, Any] = {
            "tier": np.array(self._tier),
            "tenant": np.array(trace.tenant),
            "prompt_tokens": np.array(trace.prompt_tokens, np.int64),
            "output_tokens": np.array(trace.output_tokens, np.int64),
            "arrival_s": np.full(count, np.nan),
            "outcome": np.full(count, REFUSED),
            "preemptions": np.zeros(count, np.int64),
            "cached_tokens": self.cached,
            "admitted_s": self.admitted_s,
            "first_token_s": self.first_s,
            "last_token_s": self.last_s,
            "generated_tokens": self.generated,
            "recomputed_tokens": self.recomputed,
        }
        for row, request in self.seen.items():
            columns["arrival_s"][row] = request.arrival_time
            columns["outcome"][row] = _OUTCOMES.get(request.status, 0)
            columns["preemptions"][row] = request.num_preemptions
        refused = np.isnan(columns["arrival_s"])
        columns["arrival_s"][refused] = np.array(trace.arrival_s)[refused]
        return columns


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


def _use_virtual_time(scheduler: Any, now: Any) -> None:
    scheduler.use_clock(VirtualClock(now))


@lru_cache(maxsize=1)
def _folder() -> Path:
    return Path(mkdtemp(prefix="trimtab-cases-"))


def _plan_file(plan: Plan) -> str:
    """The plan as a file: JSON is YAML."""
    path = _folder() / f"{plan.digest[:16]}.yaml"
    path.write_text(plan.model_dump_json())
    return str(path)

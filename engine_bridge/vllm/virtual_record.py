"""A development tool: a real vLLM scheduler in virtual time that notes what became of each request.

Its columns are the replay's (`replay.report`), so that one and the same check can look at both.
Under the stock rules it is vLLM's own scheduler, under the fair ones the plug-in.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from dataclasses import asdict
from functools import lru_cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any, Final

import numpy as np
import numpy.typing as npt

# Before vLLM is imported, which else looks for a GPU.
os.environ.setdefault("VLLM_TARGET_DEVICE", "cpu")

from vllm.v1.request import Request, RequestStatus

from trimtab.engine_bridge.draft_spec import DraftFile
from trimtab.engine_bridge.engine_file import write_engine_file
from trimtab.engine_bridge.engine_spec import EngineSpec, find_engine_file
from trimtab.engine_bridge.plan import Plan
from trimtab.engine_bridge.replay.engine import RuleSet
from trimtab.engine_bridge.replay.layout import CANCELLED, FINISHED, REFUSED, SHED
from trimtab.engine_bridge.trace import Trace
from trimtab.engine_bridge.vllm.scheduler import FairScheduler
from trimtab.engine_bridge.vllm.virtual_time import Step, VirtualClock, VirtualVllm

_OUTCOMES: Final = {
    RequestStatus.FINISHED_LENGTH_CAPPED: FINISHED,
    RequestStatus.FINISHED_ERROR: SHED,
    RequestStatus.FINISHED_ABORTED: CANCELLED,
}


class RecordedVllm(VirtualVllm):
    """`VirtualVllm` under stock rules or the fair ones; notes each request's times."""

    def __init__(
        self,
        trace: Trace,
        spec: EngineSpec,
        rules: RuleSet,
        plan: Plan,
        **speculation: Any,
    ) -> None:
        """Set it up before the first arrival.

        Args:
            trace: The traffic; its tiers must be the plan's.
            spec: The engine's facts.
            rules: `fair`, or vLLM's own `fcfs` or `priority`.
            plan: The plan that the plug-in keeps to.
            speculation: `draft_tokens` and `accepts` of `VirtualVllm`.
        """
        fair = rules == "fair"
        plugged: dict[str, Any] = {}
        if fair:
            plugged = {"scheduler_class": FairScheduler, "prepare": _use_virtual_time}
        super().__init__(
            trace,
            plan,
            spec,
            **plugged,
            policy="priority" if fair else rules,
            additional_config={"trimtab": {"engine": engine_of(spec), "plan": _plan_file(plan)}},
            **speculation,
        )
        count = len(trace)
        self.seen: dict[int, Request] = {}
        self.admitted_s, self.first_s, self.last_s = np.full((3, count), np.nan)
        self.generated, self.cached = np.zeros((2, count), np.int64)
        self.computed, self.recomputed = np.zeros((2, count), np.int64)
        self.drafted, self.accepted, self.decodes = np.zeros((3, count), np.int64)
        self.chunks: dict[int, int] = {}
        """Prefill tokens of the last step, by row."""
        self.busy_s = 0.0

    @property
    def trace(self) -> Trace:
        """The traffic."""
        return self._trace

    @property
    def tiers(self) -> list[int]:
        """The plan's number of each row's tier."""
        return self._tier

    def held_blocks(self) -> dict[int, int]:
        """KV blocks that each running row holds."""
        manager = self.scheduler.kv_cache_manager
        return {
            int(r.request_id): len(manager.get_block_ids(r.request_id)[0])
            for r in self.scheduler.running
        }

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
            self.decodes[row] += row not in self.chunks
            self.drafted[row] += drafts
            self.accepted[row] += len(tokens) - 1
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
            if row in self.chunks:
                # A decode's refused drafts are taken back: it computes nothing again.
                self.recomputed[row] += max(0, min(to, int(self.computed[row])) - (to - tokens))
            self.computed[row] = max(to, self.computed[row])
        return done

    def advance(self, until_s: float) -> None:
        """Run steps until that time or the end."""
        while self.left > 0 and self.now_s < until_s and self.step() is not None:
            pass

    def preemptions(self) -> npt.NDArray[np.int64]:
        """How often each row has lost its place so far."""
        count = np.zeros(len(self._trace), np.int64)
        for row, request in self.seen.items():
            count[row] = request.num_preemptions
        return count

    def requests(self) -> dict[str, npt.NDArray[Any]]:
        """The replay's columns of all requests."""
        trace, count = self._trace, len(self._trace)
        columns: dict[str, npt.NDArray[Any]] = {
            "tier": np.array(self._tier),
            "tenant": np.array(trace.tenant),
            "prompt_tokens": np.array(trace.prompt_tokens, np.int64),
            "output_tokens": np.array(trace.output_tokens, np.int64),
            "arrival_s": np.full(count, np.nan),
            "outcome": np.full(count, REFUSED),
            "preemptions": self.preemptions(),
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
        refused = np.isnan(columns["arrival_s"])
        columns["arrival_s"][refused] = np.array(trace.arrival_s)[refused]
        return columns


def _use_virtual_time(scheduler: Any, now: Any) -> None:
    scheduler.use_clock(VirtualClock(now))


@lru_cache(maxsize=1)
def _folder() -> Path:
    return Path(mkdtemp(prefix="trimtab-virtual-plans-"))


def engine_of(spec: EngineSpec) -> str:
    """The engine's name; one with drafts or an encoder of its own as a file that says so."""
    if spec.draft is None and spec.encoder is None:
        return spec.name
    facts: dict[str, Any] = {}
    if spec.draft is not None:
        acceptance = {"acceptance": dict(spec.draft.acceptance)}
        facts["draft"] = DraftFile(**asdict(spec.draft) | acceptance)
    if spec.encoder is not None:
        facts["encoder"] = spec.encoder.as_file()
    file = find_engine_file(spec.name).model_copy(update=facts)
    name = hashlib.sha256(file.model_dump_json().encode()).hexdigest()[:16]
    path = _folder() / f"{name}.yaml"
    write_engine_file(file, path)
    return str(path)


def _plan_file(plan: Plan) -> str:
    """The plan as a file: JSON is YAML."""
    path = _folder() / f"{plan.digest[:16]}.yaml"
    path.write_text(plan.model_dump_json())
    return str(path)

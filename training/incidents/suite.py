"""The incidents by their letters, a run of several of them, and the result for machines.

It prints nothing and writes no file.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from trimtab.engine_bridge.errors import FlagError
from trimtab.training.incidents import (
    draft_mismatch,
    kv_avalanche,
    poison_prompt,
    prefill_blocking,
)
from trimtab.training.incidents.incident import (
    AFTER,
    BEFORE,
    PRIORITY,
    SHIPPED,
    SLICED_BEFORE,
    Bound,
    Finding,
    Incident,
    Verdict,
    examine,
)
from trimtab.training.incidents.served import Serve

SCHEMA: Final = 1
INCIDENTS: Final[dict[str, Incident]] = {
    module.INCIDENT.key: module.INCIDENT
    for module in (prefill_blocking, kv_avalanche, draft_mismatch, poison_prompt)
}
EngineName = Literal["replay", "emulated"]
ENGINES: Final[tuple[EngineName, ...]] = ("replay", "emulated")


@dataclass(frozen=True, kw_only=True)
class SuiteResult:
    """What came of the incidents that were asked for."""

    engine: EngineName
    seed: int
    verdicts: tuple[Verdict, ...]

    @property
    def all_well(self) -> bool:
        """Whether every incident was reproduced and cured."""
        return all(verdict.reproduced and verdict.cured for verdict in self.verdicts)

    def to_json(self) -> str:
        """The result as JSON; what is not known is null."""
        incidents = {verdict.incident.key: _told(verdict) for verdict in self.verdicts}
        whole = {
            "schema": SCHEMA,
            "engine": self.engine,
            "seed": self.seed,
            "incidents": incidents,
        }
        return json.dumps(whole, indent=1, allow_nan=False)


def server(engine: EngineName) -> Serve:
    """What serves the scripts.

    Raises:
        FlagError: vLLM is asked for and not installed.
    """
    if engine == "replay":
        from trimtab.training.incidents import replayed

        return replayed.serve
    try:
        from trimtab.training.incidents import emulated
    except ImportError as error:
        raise FlagError(
            "--engine",
            value=engine,
            bound="replay without vLLM",
            remedy=f"{error.name} is missing: pip install 'trimtab[vllm]'",
        ) from None
    return emulated.serve


def run_suite(
    keys: Sequence[str],
    engine: EngineName,
    *,
    seed: int,
    on_done: Callable[[Verdict], None] = lambda verdict: None,
) -> SuiteResult:
    """Run incidents one after the other.

    Args:
        keys: Their letters.
        engine: The replay, or vLLM's own scheduler in virtual time; that one makes only the runs
            that bounds are about, as it is slow.
        seed: Of the traffic.
        on_done: Told of each verdict.

    Raises:
        FlagError: vLLM is asked for and not installed.
    """
    serve, verdicts = server(engine), []
    for key in keys:
        verdict = examine(INCIDENTS[key], serve, seed, beside=engine == "replay")
        on_done(verdict)
        verdicts.append(verdict)
    return SuiteResult(engine=engine, seed=seed, verdicts=tuple(verdicts))


def _told(verdict: Verdict) -> dict[str, Any]:
    others = {
        label: _known(verdict.figures_of(label))
        for label in (PRIORITY, SLICED_BEFORE, SHIPPED)
        if label in verdict.runs
    }
    run = verdict.runs[BEFORE]
    return {
        "title": verdict.incident.title,
        "symptom": verdict.incident.symptom,
        "traffic": verdict.incident.traffic,
        "remedy": verdict.incident.remedy,
        "engine": run.spec.name,
        "reproduced": verdict.reproduced,
        "cured": verdict.cured,
        "before": _known(verdict.figures_of(BEFORE)),
        "after": _known(verdict.figures_of(AFTER)),
        "others": others,
        "figures": [_figure(finding) for finding in verdict.findings],
        "refusals": {
            label: dict(made.refusals) for label, made in verdict.runs.items() if made.refusals
        },
    }


def _figure(finding: Finding) -> dict[str, Any]:
    figure = finding.figure
    return {
        "name": figure.name,
        "words": figure.words,
        "unit": figure.unit,
        "before": _number(finding.before),
        "after": _number(finding.after),
        "bound_before": _bound(figure.reproduced),
        "bound_after": _bound(figure.cured),
        "reproduced": finding.reproduced,
        "cured": finding.cured,
        "why": figure.why,
    }


def _bound(bound: Bound | None) -> dict[str, float | None] | None:
    return None if bound is None else {"low": _number(bound.low), "high": _number(bound.high)}


def _known(figures: dict[str, float]) -> dict[str, float | None]:
    return {name: _number(value) for name, value in figures.items()}


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None

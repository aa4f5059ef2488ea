"""A diagnosis whole: signs, findings, and what to try, as values, lines for people and JSON.

It reads no file (`sources`) and prints nothing.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import Any, Final

from trimtab.engine_bridge.engine_spec import EngineSpec
from trimtab.engine_bridge.errors import PlanError
from trimtab.engine_bridge.plan import Plan
from trimtab.training.diagnosis.remedies import Remedy, changed_plan, remedy_of, together
from trimtab.training.diagnosis.signatures import Finding, findings
from trimtab.training.diagnosis.signs import Signs
from trimtab.training.whatif.schema import jsonable

SCHEMA: Final = 1
HEALTHY: Final = "healthy"
"""Name of a run without a finding."""
_TITLES: Final = {
    "infeasible_plan": "The plan promises what this engine cannot do",
    "overload": "There is more work than the engine can do",
    "kv_avalanche": "KV memory: requests evict each other and compute the same again",
    "poison_prompt": "A prompt of extreme length holds the engine",
    "prefill_blocking": "Long prompts block short ones",
    "draft_mismatch": "Speculation costs more than it gives",
    "unexplained": "Slow for a reason that none of the signatures explains",
}


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """What is wrong with one run, and what to try."""

    source: str
    """What was looked at, for people."""
    signs: Signs
    findings: tuple[Finding, ...]
    remedies: tuple[Remedy, ...]
    """One a finding, in the same order."""
    plan: Plan
    """The plan that ran."""

    @property
    def primary(self) -> str:
        """The signature of the first finding, or `healthy`."""
        return str(self.findings[0].signature) if self.findings else HEALTHY

    @property
    def remedy(self) -> Remedy:
        """All remedies as one."""
        return together(list(self.remedies))

    def remedied_plan(self) -> Plan | None:
        """The plan with all changes; None where there are none, or they contradict each other."""
        changes = self.remedy.changes
        if not changes:
            return None
        try:
            return changed_plan(self.plan, changes)
        except (PlanError, ValueError):
            return None

    def lines(self) -> tuple[str, ...]:
        """The diagnosis for people."""
        if not self.findings:
            return (f"{self.source}: healthy. Every promise of plan {self.plan.name} was kept.",)
        told = [f"{self.source}: {self.primary}"]
        for finding in self.findings:
            told += ["", f"{_TITLES[finding.signature]} ({finding.signature}, {finding.tier})"]
            told += [f"  - {sentence}" for sentence in finding.evidence]
        remedy = self.remedy
        told += ["", "To try:"]
        if remedy.policy is not None:
            told.append(f"  - the fair scheduler: policy {remedy.policy} instead of stock rules")
        for place, value in remedy.changes.items():
            told.append(f"  - {'.'.join(place)}: {_yaml(value)}  (now {_yaml(self._now(place))})")
        told += [f"  - {line}" for line in remedy.advice]
        return tuple(told)

    def _now(self, place: tuple[str, ...]) -> Any:
        section: Any = self.plan.model_dump(mode="json")
        for key in place:
            section = section[key]
        return section

    def to_json(self) -> str:
        """For machines, the same bytes for the same diagnosis."""
        remedy = self.remedy
        content = {
            "schema": SCHEMA,
            "source": self.source,
            "plan": self.plan.name,
            "signature": self.primary,
            "findings": [
                {
                    "signature": str(finding.signature),
                    "tier": finding.tier,
                    "share": finding.share,
                    "evidence": list(finding.evidence),
                }
                for finding in self.findings
            ],
            "remedy": {
                "policy": remedy.policy,
                "plan": {".".join(place): value for place, value in remedy.changes.items()},
                "advice": list(remedy.advice),
            },
            "signs": dataclasses.asdict(self.signs),
        }
        return json.dumps(jsonable(content), indent=1, allow_nan=False)


def diagnose(signs: Signs, plan: Plan, spec: EngineSpec, *, source: str) -> Diagnosis:
    """Diagnose a run by its signs.

    Args:
        signs: Its signs.
        plan: The plan that it was run under, or is to be judged by.
        spec: The engine.
        source: What was looked at, for people.
    """
    found = findings(signs, plan, spec)
    return Diagnosis(
        source=source,
        signs=signs,
        findings=found,
        remedies=tuple(remedy_of(finding, signs, plan) for finding in found),
        plan=plan,
    )


def _yaml(value: Any) -> str:
    return json.dumps(value)

"""An admission with a clock that the test moves, and requests for it."""

from __future__ import annotations

import json
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from trimtab.engine_bridge.admission.asked import Asked
from trimtab.engine_bridge.admission.core import Admission
from trimtab.engine_bridge.admission.memory_ledger import MemoryLedger
from trimtab.engine_bridge.admission.refusal import Refusal
from trimtab.engine_bridge.admission.settings import AdmissionSettings
from trimtab.engine_bridge.admission.ticket import Ticket
from trimtab.engine_bridge.plan import Plan, load_plan
from trimtab.engine_bridge.vllm.identity import Identity

T = TypeVar("T")
PLAN = load_plan()
CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"


def now(waiting: Coroutine[Any, Any, T]) -> T:
    """The result of a coroutine that never waits for anything."""
    try:
        waiting.send(None)
    except StopIteration as end:
        result: T = end.value
        return result
    raise AssertionError("it waits")


@dataclass
class Clock:
    """Seconds that pass when the test says so."""

    s: float = 1000.0

    def __call__(self) -> float:
        return self.s


def settings(**values: Any) -> AdmissionSettings:
    """Settings as the file would give them; limits of a tier may be given as `T0={...}`."""
    tiers = {name: values.pop(name) for name in list(values) if name in PLAN.tiers}
    return AdmissionSettings.model_validate({"tiers": tiers, **values})


def asked(
    tenant: str = "acme",
    *,
    tier: str = "T0",
    path: str = COMPLETIONS,
    body: Mapping[str, object] | None = None,
    **fields: object,
) -> Asked:
    """A request; fields go into its body."""
    given = {"model": "m", "prompt": "x", **fields} if body is None else body
    length = len(json.dumps(given))
    return Asked(identity=Identity(tenant, tier), path=path, body=given, body_bytes=length)


@dataclass
class Rig:
    """An admission over memory."""

    rules: AdmissionSettings
    clock: Clock = field(default_factory=Clock)
    plan: Plan = PLAN
    more: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.ledger = MemoryLedger(self.clock)
        self.admission = Admission(
            self.rules, self.plan, limiter=self.ledger, monotonic_s=self.clock, **self.more
        )

    def admit(self, tenant: str = "acme", **fields: Any) -> Ticket | Refusal:
        return now(self.admission.admit(asked(tenant, **fields)))

    def ticket(self, tenant: str = "acme", **fields: Any) -> Ticket:
        judged = self.admit(tenant, **fields)
        assert isinstance(judged, Ticket), judged
        return judged

    def refusal(self, tenant: str = "acme", **fields: Any) -> Refusal:
        judged = self.admit(tenant, **fields)
        assert isinstance(judged, Refusal), "it was admitted"
        return judged

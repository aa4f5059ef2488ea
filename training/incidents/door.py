"""The real admission core in front of an engine in virtual time: whom it lets through.

It judges what a request is when it comes: its tier, its tenant, how long its prompt is. When
requests end it does not know, so settings that count what still runs, or what was generated, have
no place here. The trace's arrivals must be known (no closed loops).
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Coroutine, Mapping
from typing import Any, TypeVar

import numpy as np

from trimtab.engine_bridge.admission.asked import Asked
from trimtab.engine_bridge.admission.core import Admission
from trimtab.engine_bridge.admission.counting import given_token_ids
from trimtab.engine_bridge.admission.memory_ledger import MemoryLedger
from trimtab.engine_bridge.admission.refusal import Refusal
from trimtab.engine_bridge.admission.settings import AdmissionSettings
from trimtab.engine_bridge.engine_spec import EngineSpec
from trimtab.engine_bridge.plan import Plan
from trimtab.engine_bridge.trace import Trace
from trimtab.engine_bridge.vllm.identity import Identity

T = TypeVar("T")
_PATH = "/v1/completions"


class _GivenTokens:
    """Prompts come as token ids here, so that their length is known exactly."""

    async def count(self, asked: Asked) -> int | None:
        return given_token_ids(asked.body)


def admit(
    trace: Trace, settings: AdmissionSettings, plan: Plan, spec: EngineSpec
) -> tuple[Trace, Mapping[str, int]]:
    """What of the trace gets to the engine, and how many requests were refused, by code."""
    now_s = 0.0
    admission = Admission(
        settings,
        plan,
        limiter=MemoryLedger(lambda: now_s),
        monotonic_s=lambda: now_s,
        counter=_GivenTokens(),
        engine=spec,
    )
    passed, refusals = [], Counter[str]()
    for row in range(len(trace)):
        now_s = float(trace.arrival_s[row])
        judged = _now(admission.admit(_asked(trace, row)))
        if isinstance(judged, Refusal):
            refusals[f"{judged.status} {judged.code}"] += 1
        else:
            passed.append(row)
    return trace.take(np.array(passed, np.int64)), dict(refusals)


def _asked(trace: Trace, row: int) -> Asked:
    body = {
        "prompt": [0] * int(trace.prompt_tokens[row]),
        "max_tokens": int(trace.output_tokens[row]),
    }
    who = Identity(trace.tenant_names[trace.tenant[row]], tier=trace.tier_names[trace.tier[row]])
    return Asked(identity=who, path=_PATH, body=body, body_bytes=len(json.dumps(body)))


def _now(judging: Coroutine[Any, Any, T]) -> T:
    """The result of a coroutine that waits for nothing: the memory ledger's calls never do."""
    try:
        judging.send(None)
    except StopIteration as end:
        result: T = end.value
        return result
    raise AssertionError("admission over memory waited for something")

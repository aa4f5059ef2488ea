"""What a request would take of its tenant's quotas if it were admitted. It takes nothing.

What is not known yet is reserved at its most, and trued up when the request ends.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from trimtab.engine_bridge.admission import refusal
from trimtab.engine_bridge.admission.asked import Answers, Asked
from trimtab.engine_bridge.admission.bounds import (
    BUDGET,
    BURST,
    CACHED_PRICE,
    FRESH_PRICE,
    OUTPUT,
    PROMPT,
    REQUESTS,
    TOKEN_PRICE,
    Bounds,
)
from trimtab.engine_bridge.admission.limiter import Charge, Places
from trimtab.engine_bridge.admission.outcome import Outcome, Used
from trimtab.engine_bridge.admission.refusal import Refusal

LEASE_S: Final = 60.0
"""A place whose request nobody renews comes back after so long."""
_NOT_WORKED_ON: Final = frozenset((Outcome.INVALID, Outcome.REFUSED, Outcome.UNREACHABLE))


@dataclass(frozen=True, slots=True)
class Bill:
    """What a request would take."""

    charges: tuple[Charge, ...]
    places: Places | None
    prompt_tokens: int
    output_tokens: int
    """Of all answers together."""
    answers: int
    changes: Mapping[str, object]
    """Fields of the body that bound the answers as the bill has it."""


def make_bill(
    asked: Asked, bounds: Bounds, answers: Answers, *, prompt_tokens: int, expected_tokens: int
) -> Bill | Refusal:
    """The bill of a request, or a refusal if a quota could never hold it.

    Args:
        asked: The request.
        bounds: What its tenant may ask for.
        answers: What it asks for.
        prompt_tokens: What its prompt takes.
        expected_tokens: Length of an answer where the request names no bound.
    """
    changes = _changes(asked, bounds, answers)
    longest = bounds.limits.longest_output_tokens
    each = expected_tokens if answers.longest is None else answers.longest
    each = each if longest is None else min(each, longest)
    output = each * answers.count
    if answers.longest is None and bounds.output is not None:
        # An expectation alone refuses nobody for good.
        output = min(output, bounds.output.limit)
    most = bounds.limits.concurrent_requests
    if most is not None and answers.count > most:
        return refusal.never_fits("places at once", answers.count, most)
    charges = []
    for quota, amount in (
        (bounds.requests, answers.count),
        (bounds.burst, answers.count),
        (bounds.prompt, prompt_tokens),
        (bounds.output, output),
        (bounds.budget, priced(prompt_tokens, 0, output)),
    ):
        if quota is not None and amount > quota.limit:
            unit = FRESH_PRICE if quota.name == BUDGET else 1
            return refusal.never_fits(WORDS[quota.name], amount // unit, quota.limit // unit)
        if quota is not None:
            charges.append(Charge(quota, amount))
    places = None if most is None else Places(most, answers.count, LEASE_S)
    return Bill(tuple(charges), places, prompt_tokens, output, answers.count, changes)


WORDS: Final = {
    REQUESTS: "requests a minute",
    BURST: "requests a second",
    PROMPT: "prompt tokens a minute",
    OUTPUT: "output tokens a minute",
    BUDGET: "priced tokens a day",
}
"""Quotas for people."""


def spent(bill: Bill, used: Used) -> dict[str, int]:
    """What a request has really taken, by the quotas' names."""
    idle = used.outcome in _NOT_WORKED_ON
    prompt = _known(used.prompt_tokens, 0 if idle else bill.prompt_tokens)
    output = _known(used.output_tokens, 0 if idle else bill.output_tokens)
    cached = min(prompt, max(0, used.cached_tokens))
    requests = 0 if used.outcome is Outcome.UNREACHABLE else bill.answers
    return {
        REQUESTS: requests,
        BURST: requests,
        PROMPT: prompt,
        OUTPUT: output,
        BUDGET: priced(prompt, cached, output),
    }


def priced(prompt: int, cached: int, output: int) -> int:
    """Tenths of priced tokens of so many tokens."""
    return FRESH_PRICE * (prompt - cached) + CACHED_PRICE * cached + TOKEN_PRICE * output


def _known(tokens: int | None, otherwise: int) -> int:
    return otherwise if tokens is None else max(0, tokens)


def _changes(asked: Asked, bounds: Bounds, answers: Answers) -> dict[str, object]:
    """Bounds of the answers that are cut or filled in."""
    longest = bounds.limits.longest_output_tokens
    if longest is None or not answers.fields:
        return {}
    if answers.longest is None:
        return {answers.fields[0]: longest}
    given = {name: asked.body.get(name) for name in answers.fields}
    return {n: longest for n, v in given.items() if isinstance(v, int) and v > longest}

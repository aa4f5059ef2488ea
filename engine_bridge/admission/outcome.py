"""How admitted requests end, and what they have used by then."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum


class Outcome(StrEnum):
    """How an admitted request ended."""

    FINISHED = "finished"
    """With its last token."""
    CANCELLED = "cancelled"
    """The client left."""
    INVALID = "invalid"
    """The engine answered 4xx: it has computed nothing. It says nothing about the tenant."""
    REFUSED = "refused"
    """The engine gave it up (late shedding, 429 or 503): likewise."""
    FAILED = "failed"
    """The engine answered 5xx, or its stream broke off. Counts against the tenant's breaker."""
    TIMED_OUT = "timed_out"
    """No answer in time. Counts against the tenant's breaker."""
    UNREACHABLE = "unreachable"
    """No engine took it: not the tenant's fault, and it is charged nothing at all."""


@dataclass(frozen=True, kw_only=True)
class Used:
    """What a request has used; None where it is not known."""

    outcome: Outcome
    prompt_tokens: int | None = None
    cached_tokens: int = 0
    output_tokens: int | None = None


def outcome_of(status: int) -> Outcome:
    """What an engine's HTTP status says about a request."""
    if status < 400:
        return Outcome.FINISHED
    if status in (408, 504):
        return Outcome.TIMED_OUT
    if status in (429, 503):
        return Outcome.REFUSED
    return Outcome.INVALID if status < 500 else Outcome.FAILED


def error_status(error: Mapping[str, object]) -> int:
    """HTTP status that an error inside a stream stands for; 500 if it says none."""
    code = error.get("code")
    if isinstance(code, str) and code.isdigit():
        code = int(code)
    return code if isinstance(code, int) and 400 <= code < 600 else 500

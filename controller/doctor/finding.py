"""What one look found, and what to do about it. Values only."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Final

from trimtab.engine_bridge.errors import InputError, TrimtabError

ODD_ANSWER: Final = (
    *(ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError),
)
"""What reading an answer raises whose form is not what was asked for, whoever has sent it."""


class Verdict(enum.StrEnum):
    """How bad it is."""

    OK = "ok"
    """As it should be."""
    NOTE = "note"
    """Good to know; right for some deployments."""
    WARNING = "warning"
    """It works, but worse than it could, or not for long."""
    FAULT = "fault"
    """It does not work."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One line of the report."""

    area: str
    """What it belongs to, for instance `installation` or `engine a`."""
    check: str
    """What was looked at."""
    verdict: Verdict
    found: str
    """What is there, in one line."""
    remedy: str = ""
    """What to do; empty where there is nothing to do."""


def fault_of(area: str, check: str, error: TrimtabError) -> Finding:
    """The finding that an error of ours makes: its own line, its remedy apart."""
    text, remedy = str(error), error.remedy if isinstance(error, InputError) else ""
    if remedy:
        text = text.removesuffix(remedy).removesuffix("; ")
    return Finding(area=area, check=check, verdict=Verdict.FAULT, found=text, remedy=remedy)

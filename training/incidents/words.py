"""Figures, bounds and verdicts of incidents as people read them."""

from __future__ import annotations

import math

from trimtab.training.incidents.incident import Bound, Finding, Unit, Verdict
from trimtab.training.report import words

YES, NO, NONE = "yes", "**no**", words.NONE
MOST_NAMED = 4
"""So many of the figures that hold a verdict's sentence names."""


def figure(value: float, unit: Unit) -> str:
    """A figure with its unit: "8.62 s", "46 times", "17.3 %"."""
    if value == math.inf:
        return "never"
    if not math.isfinite(value):
        return NONE
    if unit == "share":
        return words.percent(value)
    if unit == "count":
        return words.number(value, 0)
    return f"{words.figures(value)} {unit}"


def bound(inside: Bound | None, unit: Unit) -> str:
    """Where a figure must lie: "at most 3.00 times", "0.100 s to 0.400 s"."""
    if inside is None:
        return NONE
    low, high = math.isfinite(inside.low), math.isfinite(inside.high)
    if low and high:
        return f"{figure(inside.low, unit)} to {figure(inside.high, unit)}"
    if low:
        return f"at least {figure(inside.low, unit)}"
    return f"at most {figure(inside.high, unit)}"


def met(finding: Finding) -> str:
    """Whether a figure's bounds hold: "yes", "no", or nothing where it has none."""
    judged = [held for held in (finding.reproduced, finding.cured) if held is not None]
    if not judged:
        return NONE
    return YES if all(judged) else NO


def sentence(verdict: Verdict) -> str:
    """The verdict with the figures that decide it; of those that hold the first ones."""
    missed_before = [f for f in verdict.findings if f.reproduced is False]
    missed_after = [f for f in verdict.findings if f.cured is False]
    if missed_before:
        reasons = "; ".join(_missed(f, f.before, f.figure.reproduced) for f in missed_before)
        first = f"Not reproduced: {reasons}."
    else:
        seen = [f for f in verdict.findings if f.reproduced]
        first = f"Reproduced: {_some([_told(f, f.before) for f in seen])}."
    if missed_after:
        reasons = "; ".join(_missed(f, f.after, f.figure.cured) for f in missed_after)
        return f"{first} Not cured: {reasons}."
    held = [f for f in verdict.findings if f.cured]
    return f"{first} Cured: {_some([_told(f, f.after) for f in held])}."


def _some(told: list[str]) -> str:
    """The first ones, and how many more there are: all of them stand in the table."""
    more = len(told) - MOST_NAMED
    if more <= 1:
        return "; ".join(told)
    return f"{'; '.join(told[:MOST_NAMED])}; and {more} further bounds hold"


def _told(finding: Finding, value: float) -> str:
    return f"{_name(finding)} {figure(value, finding.figure.unit)}"


def _missed(finding: Finding, value: float, inside: Bound | None) -> str:
    return f"{_told(finding, value)}, not {bound(inside, finding.figure.unit)}"


def _name(finding: Finding) -> str:
    text = finding.figure.words
    return text[0].lower() + text[1:]

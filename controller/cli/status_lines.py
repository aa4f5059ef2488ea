"""The text of `trimtab status`: a sentence an engine, and a table of what the tiers get.

It takes what the daemon's `/api/state` gives and asks nobody.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, Final

from trimtab.controller.web.words import age_words

_MARKS: Final = {"good": "ok  ", "note": "note", "bad": "BAD "}


def lines(engines: Iterable[Mapping[str, Any]]) -> list[str]:
    """One line an engine, more where something is to be said, a table where tiers are given."""
    found = []
    for engine in engines:
        age = age_words(math.inf if engine["age_s"] is None else engine["age_s"])
        mark = _MARKS.get(engine["level"], engine["level"])
        found.append(_safe(f"{mark} {engine['engine']}: {engine['headline']}; {age}"))
        found += [
            _safe(f"     {text}") for text in (engine["hint"], engine.get("detail", "")) if text
        ]
        if "tiers" in engine:
            found += _tier_table(engine)
    return found


def _tier_table(engine: Mapping[str, Any]) -> list[str]:
    rows = [("tier", "within", "target", "judged", "waiting", "running", "ttft p99", "weight",
             "plan", "KV", "plan")]  # fmt: skip
    applied, static = engine["applied"], engine["static"]
    for tier in engine["tiers"]:
        name, pool, now = tier["tier"], tier["pool"], tier["now"] or {}
        given = applied or {}
        rows.append(
            (
                name,
                _percent(tier["met"] / tier["judged"] if tier["judged"] else None),
                _percent(tier["targets"]["attainment"]),
                f"{tier['judged']:,}",
                _count(now.get("queue_length")),
                _count(now.get("running")),
                _milliseconds(now.get("ttft_ms_p99")),
                _figures(given.get("weights", {}).get(name)),
                _figures(static["weights"][name]),
                _percent(given.get("kv_fractions", {}).get(pool)),
                _percent(static["kv_fractions"][pool]),
            )
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        _safe(
            "     " + "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        )
        for row in rows
    ]


def _percent(fraction: float | None) -> str:
    return "-" if fraction is None else f"{math.floor(1000 * fraction + 1e-9) / 10:.1f} %"


def _count(value: int | None) -> str:
    return "-" if value is None else f"{value:,}"


def _milliseconds(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f} ms"


def _figures(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def _safe(text: str) -> str:
    """Without what a terminal would obey: names and errors come from elsewhere."""
    return "".join(c if c.isprintable() else " " for c in text).rstrip()

"""Entries of an audit log as rows for people: what happened, in words, equal ticks in one row.

Pure: it reads no file and prints nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any, Final

from trimtab.agents import audit_entry as entries
from trimtab.agents.audit_entry import AuditError, Decided
from trimtab.agents.knob_entries import named_entries
from trimtab.agents.verdict import GuardReason
from trimtab.controller.daemon.state import Contact
from trimtab.controller.web.words import CONTACTS, REASONS, seconds
from trimtab.engine_bridge.allocation import UNLIMITED, Allocation
from trimtab.engine_bridge.plan import Plan

_MOST_CHANGES: Final = 4
"""Entries of the allocation that a row names; JSON has all."""
_SHORT: Final[Mapping[str, str]] = {
    "weights": "weight",
    "kv_fractions": "KV",
    "prefill_budget_tokens": "prefill budget",
    "prefill_shares": "prefill",
    "low_tier_chunk_share": "low tiers' share",
    "slack_fraction": "slack",
    "shed_at": "shed at",
    "draft_tokens": "draft",
    "max_running": "running",
    "max_num_seqs": "batch",
}


@dataclass(frozen=True, kw_only=True)
class Row:
    """One row: a decision, several equal ones, or something that was said to the loop."""

    unix_s: float
    engine: str
    kind: str
    """Of the entry, or `damaged`."""
    number: int | None = None
    """The tick's; None for what is no decision."""
    mode: str = ""
    reasons: tuple[str, ...] = ()
    exposure: float | None = None
    age_s: float | None = None
    """Of the telemetry, seconds; None without any."""
    allocation: str = ""
    """What was asked for, compared with static, in words."""
    text: str = ""
    """Why, or what was said; in words."""
    until_unix_s: float = 0.0
    """Time of the last of several equal ticks."""
    ticks: int = 1
    """Equal ticks in a row that this stands for."""
    content: Mapping[str, object] | None = None
    """The first entry for machines, by names."""

    def same(self, other: Row) -> bool:
        """Whether two decisions in a row say the same, but for their time and the data's age."""
        return self._said() == other._said() and self.number is not None

    def _said(self) -> tuple[object, ...]:
        return (
            self.kind,
            self.engine,
            self.mode,
            self.reasons,
            self.exposure,
            self.text,
            (self.allocation),
        )


class RowMaker:
    """Makes rows of one engine's entries; it knows the plan of the last start entry."""

    def __init__(self, engine: str) -> None:
        """Begin before the first start entry."""
        self._engine = engine
        self._plan: Plan | None = None
        self._static: Allocation | None = None

    def row(self, where: str, entry: Mapping[str, Any]) -> Row | None:
        """The row of one entry; one that is damaged says so.

        None for the start entry of a further file, which tells people nothing.
        """
        try:
            row = self._row(where, entry)
            return None if entry["kind"] == entries.START and entry["after"] else row
        except (AuditError, KeyError, TypeError, ValueError) as fault:
            text = str(fault) if isinstance(fault, AuditError) else f"{where}: {fault!r}"
            unix_s = entry.get("unix_s")
            return Row(
                unix_s=float(unix_s) if isinstance(unix_s, int | float) else 0.0,
                engine=self._engine,
                kind="damaged",
                text=text,
                content={"kind": "damaged", "text": text},
            )

    def _row(self, where: str, entry: Mapping[str, Any]) -> Row:
        kind, unix_s = str(entry["kind"]), float(entry["unix_s"])
        if kind == entries.START:
            self._plan, _, _ = entries.decode_start(entry, where)
            self._static = Allocation.static(self._plan)
        if kind == entries.DECISION:
            assert self._plan is not None
            assert self._static is not None
            decided = entries.decode_decision(entry, self._static, where)
            return self._decision(decided, self._plan, self._static)
        hidden = ("plan", "fields", "static", "memory", "settings")
        return Row(
            unix_s=unix_s,
            engine=self._engine,
            kind=kind,
            text=_said(entry),
            content={name: value for name, value in entry.items() if name not in hidden},
        )

    def _decision(self, decided: Decided, plan: Plan, static: Allocation) -> Row:
        verdict, telemetry = decided.verdict, decided.telemetry
        age_s = None if telemetry is None else telemetry.age_s
        row = Row(
            unix_s=decided.unix_s,
            until_unix_s=decided.unix_s,
            engine=self._engine,
            kind=entries.DECISION,
            number=decided.number,
            age_s=age_s,
            text=_why(decided, plan),
            content=_content(decided, plan),
        )
        if verdict is None:
            return row
        return replace(
            row,
            mode=str(verdict.mode),
            reasons=tuple(map(str, verdict.reasons)),
            exposure=verdict.exposure,
            allocation=compared(verdict.apply, static, plan),
        )


def grouped(rows: Iterable[Row]) -> Iterator[Row]:
    """Equal decisions of an engine in a row as one row."""
    held: Row | None = None
    for row in rows:
        if held is not None and held.same(row):
            held = replace(held, ticks=held.ticks + 1, until_unix_s=row.unix_s, age_s=row.age_s)
            continue
        if held is not None:
            yield held
        held = row
    if held is not None:
        yield held


def compared(allocation: Allocation, static: Allocation, plan: Plan) -> str:
    """What of an allocation differs from the static plan, the most changed entries first."""
    now, home = named_entries(allocation, plan), named_entries(static, plan)
    changed = sorted(
        (name for name in now if now[name] != home[name]),
        key=lambda name: -_change(now[name], home[name]),
    )
    if not changed:
        return "static"
    words = [_changed(name, now[name], home[name]) for name in changed[:_MOST_CHANGES]]
    more = len(changed) - len(words)
    return ", ".join(words) + (f", {more} more" if more else "")


def clock(unix_s: float) -> str:
    """A time of the log, UTC."""
    return datetime.fromtimestamp(unix_s, UTC).strftime("%Y-%m-%d %H:%M:%S")


def _change(now: float, home: float) -> float:
    return abs(math.log(now / home)) if now > 0 and home > 0 else math.inf


def _changed(name: str, now: float, home: float) -> str:
    knob, _, entry = name.partition(".")
    words = " ".join(filter(None, (_SHORT.get(knob, knob), entry)))
    if now == UNLIMITED:
        return f"{words} without a cap"
    if home == UNLIMITED or not home > 0:
        return f"{words} {now:,.6g}"
    ratio = now / home
    return f"{words} x{ratio:.3g}" if ratio >= 2 else f"{words} {100 * (ratio - 1):+.3g} %"


def _why(decided: Decided, plan: Plan) -> str:
    """Reasons, trouble with the engine and the policy's failure, in words."""
    verdict = decided.verdict
    words = []
    if decided.contact != Contact.CONTROLLING:
        known = decided.contact in list(Contact)
        words.append(CONTACTS[Contact(decided.contact)] if known else decided.contact)
    if verdict is not None:
        words += [REASONS[GuardReason(reason)] for reason in verdict.reasons]
        failed = GuardReason.POLICY_FAILED in verdict.reasons
        if failed and decided.policy_error:
            words.append(decided.policy_error)
        if decided.applied is None:
            words.append("the engine did not answer what was asked")
        elif named_entries(decided.applied, plan) != named_entries(verdict.apply, plan):
            kept = compared(decided.applied, verdict.apply, plan)
            words.append(f"the engine applied otherwise: {kept}")
    return "; ".join(words)


def _said(entry: Mapping[str, Any]) -> str:
    """An entry that is no decision, in words."""
    match entry["kind"]:
        case entries.START:
            return (
                f"the daemon began: {_policy(entry)}, mode {entry['mode']}, plan "
                f"{entry['plan']['name']} (run {entry['run']})"
            )
        case entries.COMMAND:
            return f"{entry['command']} by {entry['by'] or 'nobody named'}"
        case entries.SWAP:
            return f"another policy: {_policy(entry)}; it begins with a probation"
        case entries.INTERRUPTED:
            return f"the engine had gone back to static: {entry['reason']}; a probation begins"
        case entries.LOST:
            return f"{entry['entries']:,} entries are missing here: {entry['reason']}"
    raise ValueError(f"unknown kind {entry['kind']}")


def _policy(entry: Mapping[str, Any]) -> str:
    digest = entry["bundle_digest"]
    return f"{entry['policy']} {digest[:12]}" if digest else str(entry["policy"])


def _content(decided: Decided, plan: Plan) -> dict[str, object]:
    """A decision for machines: all values of the allocations by name, the tiers' attainment."""
    verdict, telemetry = decided.verdict, decided.telemetry
    found: dict[str, object] = {
        "kind": entries.DECISION,
        "unix_s": decided.unix_s,
        "number": decided.number,
        "contact": decided.contact,
        "fresh": decided.fresh,
        "policy_error": decided.policy_error,
        "age_s": None if telemetry is None else _finite(telemetry.age_s),
        "applied": _named(decided.applied, plan),
    }
    if verdict is not None:
        found |= {
            "mode": str(verdict.mode),
            "reasons": list(map(str, verdict.reasons)),
            "exposure": verdict.exposure,
            "fell_back": verdict.fell_back,
            "asked": _named(verdict.apply, plan),
            "proposed": _named(verdict.proposed, plan),
        }
    if telemetry is not None:
        tiers = zip(plan.tier_names, telemetry.tiers, strict=True)
        found["attainment"] = {name: _finite(tier.attainment) for name, tier in tiers}
    return found


def _named(allocation: Allocation | None, plan: Plan) -> dict[str, float] | None:
    return None if allocation is None else named_entries(allocation, plan)


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def line(row: Row, *, with_engine: bool) -> str:
    """A row as one line of fixed columns, the free text last."""
    engine = f"{row.engine:<10} " if with_engine else ""
    if row.number is None:
        return f"{clock(row.unix_s)} {engine}      * {row.text}"
    part = "" if row.exposure is None else f"{100 * row.exposure:.0f} %"
    age = "no data" if row.age_s is None else seconds(row.age_s)
    asked = row.allocation or "nothing asked"
    many = f" ({row.ticks:,} ticks, to {clock(row.until_unix_s)[11:]})" if row.ticks > 1 else ""
    why = f" - {row.text}" if row.text else ""
    return (
        f"{clock(row.unix_s)} {engine}{row.number:>7} {row.mode:<6} {part:>5} {age:>7}  "
        f"{asked}{why}{many}"
    )


def header(*, with_engine: bool) -> str:
    """The names of the columns."""
    engine = f"{'engine':<10} " if with_engine else ""
    return (
        f"{'time (UTC)':<19} {engine}{'tick':>7} {'mode':<6} {'acts':>5} {'data':>7}  "
        "asked for, against static - why"
    )

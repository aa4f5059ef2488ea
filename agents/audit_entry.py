"""Entries of the audit log: what a guarded loop saw, decided and was told, as JSON and back.

Pure functions of values; who writes lines is `controller.daemon.audit_log`, who reads files is
`audit_read`. Entries stand in the order in which the guard was called: what is told to the guard
(a command, a swap, an interruption) before the decision that it was told before. A call of the
guard without an entry, after a fault for instance, is a `lost_entry`. Nothing of a request is in
them, and no tenant's name.

Numbers are exact: a float is written as its shortest form that reads back the same, NaN is null,
infinity is "inf". Vectors carry no names; those are in the start entry. An allocation whose knobs
are the static plan's is only its version.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import cache
from importlib import metadata
from operator import attrgetter
from types import MappingProxyType
from typing import Any, Final

import numpy as np

from trimtab.agents.guard_settings import GuardSettings
from trimtab.agents.verdict import GuardMode, GuardReason, Verdict
from trimtab.engine_bridge.allocation import Allocation
from trimtab.engine_bridge.errors import InputError
from trimtab.engine_bridge.plan import Plan
from trimtab.engine_bridge.telemetry import Telemetry, TierTelemetry

FORMAT: Final = 1
"""Of the entries; in every start entry."""
START: Final = "start"
DECISION: Final = "decision"
COMMAND: Final = "command"
SWAP: Final = "swap"
INTERRUPTED: Final = "interrupted"
LOST: Final = "lost"
KINDS: Final = (START, DECISION, COMMAND, SWAP, INTERRUPTED, LOST)

NOT_ASKED: Final = "not asked: "
"""Begins a policy error where the policy was not called at all, as it was busy with an older call.
Without it the policy was called, and what it then remembers counts."""

_TELEMETRY: Final = tuple(f.name for f in fields(Telemetry) if f.name not in ("tiers", "applied"))
_TIER: Final = tuple(field.name for field in fields(TierTelemetry))
_KNOBS: Final = tuple(field.name for field in fields(Allocation) if field.name != "version")
FIELDS: Final[Mapping[str, tuple[str, ...]]] = {
    "telemetry": _TELEMETRY,
    "tier": _TIER,
    "allocation": (*_KNOBS, "version"),
}
"""Names of the vectors' entries, in their order."""

_telemetry_of = attrgetter(*_TELEMETRY)
_tier_of = attrgetter(*_TIER)
_allocation_of = attrgetter(*FIELDS["allocation"])
_DIGEST_LENGTH: Final = 16


class AuditError(InputError):
    """An audit log cannot be read, or an entry is not what its kind asks for."""


@dataclass(frozen=True, kw_only=True)
class Decided:
    """A decision entry, read back."""

    number: int
    """Counts the loop's ticks from 1."""
    unix_s: float
    telemetry: Telemetry | None
    """None before the first."""
    fresh: bool
    verdict: Verdict | None
    """None where the guard was not asked."""
    applied: Allocation | None
    """What the engine answered; None without an answer."""
    contact: str
    policy_error: str
    """Why the policy gave nothing; empty if it did."""


def start_entry(
    *,
    unix_s: float,
    engine: str,
    plan: Plan,
    policy: str,
    bundle_digest: str | None,
    settings: GuardSettings,
    mode: GuardMode,
    seed: int,
    memory: Mapping[str, object] | None = MappingProxyType({}),
    after: int = 0,
) -> dict[str, object]:
    """The entry that a run begins with, and each further file of the run.

    Args:
        unix_s: Now, seconds since 1970.
        engine: The engine's name in the settings.
        plan: The plan; its tenants are left out.
        policy: The policy's name, for instance `learned` or `bundle:FOLDER`.
        bundle_digest: Of the policy's bundle; None for a policy without one.
        settings: The guard's.
        mode: The mode that the guard began in.
        seed: What the policy was reset with.
        memory: What guard and policy remember now (`memory.remember`), so that a replay can begin
            here; empty at the beginning of a run, None if it is not known.
        after: Number of the last decision before this entry; 0 at the beginning.
    """
    return {
        "kind": START,
        "format": FORMAT,
        "unix_s": unix_s,
        "engine": engine,
        "policy": policy,
        "bundle_digest": bundle_digest,
        "mode": str(mode),
        "seed": seed,
        "settings": {**_settings_of(settings), "reach": dict(settings.reach)},
        "plan_digest": plan.digest,
        "plan": plan.model_dump(mode="json", exclude={"tenants"}),
        "fields": {name: list(names) for name, names in FIELDS.items()},
        "static": _plain(_allocation_of(Allocation.static(plan))),
        "versions": dict(own_versions()),
        "after": after,
        "memory": None if memory is None else dict(memory),
    }


def decision_entry(
    *,
    number: int,
    unix_s: float,
    static: Allocation,
    telemetry: Telemetry | None,
    fresh: bool,
    verdict: Verdict | None,
    applied: Allocation | None,
    contact: str,
    policy_error: str = "",
) -> dict[str, object]:
    """One tick: what was seen, what was decided, what the engine answered.

    Args:
        number: Counts the loop's ticks from 1.
        unix_s: Now, seconds since 1970.
        static: The plan's static allocation.
        telemetry: What the guard was given; None if there is none yet.
        fresh: Whether it tells of an interval not told of before.
        verdict: The guard's answer; None if it was not asked.
        applied: What the engine answered; None without an answer.
        contact: How the loop stands with its engine.
        policy_error: Why the policy gave nothing (it raised, it was late), in every mode, although
            in a hold no reason tells of it; begins with `NOT_ASKED` where it was not even called.
    """
    seen = None if telemetry is None else encode_telemetry(telemetry, static)
    return {
        "kind": DECISION,
        "number": number,
        "unix_s": unix_s,
        "contact": str(contact),
        "fresh": fresh,
        "verdict": None if verdict is None else encode_verdict(verdict, static),
        "applied": None if applied is None else encode_allocation(applied, static),
        "policy_error": policy_error,
        "digest": None if seen is None else digest_of(seen),
        "telemetry": seen,
    }


def command_entry(*, unix_s: float, command: str, by: str) -> dict[str, object]:
    """A command as the guard was told it: `hold`, `release`, `mode:active`, `reload`."""
    return {"kind": COMMAND, "unix_s": unix_s, "command": command, "by": by}


def swap_entry(*, unix_s: float, policy: str, bundle_digest: str | None) -> dict[str, object]:
    """Another policy took the place of the one before, between two decisions."""
    return {"kind": SWAP, "unix_s": unix_s, "policy": policy, "bundle_digest": bundle_digest}


def interrupted_entry(*, unix_s: float, reason: str) -> dict[str, object]:
    """The guard was told that the engine had gone back to the static plan by itself."""
    return {"kind": INTERRUPTED, "unix_s": unix_s, "reason": reason}


def lost_entry(*, unix_s: float, entries: int, reason: str) -> dict[str, object]:
    """So many entries are missing here, as they could not be written."""
    return {"kind": LOST, "unix_s": unix_s, "entries": entries, "reason": reason}


@cache
def own_versions() -> Mapping[str, str]:
    """What decides here: another version may decide otherwise in the last digit."""
    try:
        own = metadata.version("trimtab")
    except metadata.PackageNotFoundError:
        own = "not installed"
    return MappingProxyType({"trimtab": own, "numpy": np.__version__})


def encode_allocation(allocation: Allocation, static: Allocation) -> int | list[object]:
    """An allocation as a vector; only its version where its knobs are the static ones."""
    version = allocation.version
    if allocation == (static if static.version == version else replace(static, version=version)):
        return version
    return _plain(_allocation_of(allocation))


def encode_telemetry(telemetry: Telemetry, static: Allocation) -> dict[str, object]:
    """Telemetry as vectors."""
    return {
        "engine": _plain(_telemetry_of(telemetry)),
        "applied": encode_allocation(telemetry.applied, static),
        "tiers": [_plain(_tier_of(tier)) for tier in telemetry.tiers],
    }


def encode_verdict(verdict: Verdict, static: Allocation) -> dict[str, object]:
    """A verdict by names, its allocations as vectors."""
    proposed = verdict.proposed
    return {
        "mode": str(verdict.mode),
        "reasons": [str(reason) for reason in verdict.reasons],
        "exposure": verdict.exposure,
        "fell_back": verdict.fell_back,
        "apply": encode_allocation(verdict.apply, static),
        "proposed": None if proposed is None else encode_allocation(proposed, static),
    }


def digest_of(telemetry: Mapping[str, object]) -> str:
    """SHA-256 over encoded telemetry, the first 16 hex digits."""
    return hashlib.sha256(text_of(telemetry).encode()).hexdigest()[:_DIGEST_LENGTH]


def text_of(entry: Mapping[str, object]) -> str:
    """An entry as one line without its end.

    Raises:
        TypeError: something has no JSON form.
        ValueError: a number outside of the vectors is not finite.
    """
    return json.dumps(entry, separators=(",", ":"), allow_nan=False, default=_scalar)


def decode_start(entry: Mapping[str, Any], where: str) -> tuple[Plan, GuardSettings, GuardMode]:
    """What a start entry says of plan, settings and first mode.

    Raises:
        AuditError: it was written by another version, or is damaged.
    """
    if entry.get("format") != FORMAT:
        raise AuditError(
            where,
            key="format",
            value=entry.get("format"),
            bound=f"{FORMAT}",
            remedy="read it with the Trimtab that wrote it",
        )
    for name, names in FIELDS.items():
        if entry.get("fields", {}).get(name) != list(names):
            raise AuditError(
                where,
                key=f"fields.{name}",
                bound="those of this version",
                remedy="read it with the Trimtab that wrote it",
            )
    try:
        return (
            Plan.model_validate(entry["plan"]),
            GuardSettings(**entry["settings"]),
            GuardMode(entry["mode"]),
        )
    except (KeyError, TypeError, ValueError) as fault:
        raise AuditError(where, value=str(fault), bound="a start entry of this version") from None


def decode_decision(entry: Mapping[str, Any], static: Allocation, where: str) -> Decided:
    """A decision entry, its telemetry checked against its digest.

    Raises:
        AuditError: it is damaged or was changed.
    """
    seen = entry.get("telemetry")
    if seen is not None and (found := _digest_found(seen)) != entry.get("digest"):
        raise AuditError(
            where,
            key="digest",
            value=entry.get("digest"),
            bound=f"{found}, that of the telemetry beside it",
            remedy="the line was changed after it was written",
        )
    try:
        return Decided(
            number=int(entry["number"]),
            unix_s=float(entry["unix_s"]),
            telemetry=None if seen is None else _telemetry(seen, static),
            fresh=bool(entry["fresh"]),
            verdict=None if entry["verdict"] is None else _verdict(entry["verdict"], static),
            applied=_optional_allocation(entry["applied"], static),
            contact=str(entry["contact"]),
            policy_error=str(entry["policy_error"]),
        )
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as fault:
        text = f"{type(fault).__name__}: {fault}"
        raise AuditError(where, value=text, bound="a decision entry of this version") from None


def _digest_found(seen: Mapping[str, Any]) -> str:
    try:
        return digest_of(seen)
    except ValueError:
        return "none: a number is beyond every float"


def _telemetry(seen: Mapping[str, Any], static: Allocation) -> Telemetry:
    return Telemetry(
        **_named(_TELEMETRY, seen["engine"]),
        applied=_allocation(seen["applied"], static),
        tiers=tuple(TierTelemetry(**_named(_TIER, tier)) for tier in seen["tiers"]),
    )


def _verdict(verdict: Mapping[str, Any], static: Allocation) -> Verdict:
    return Verdict(
        apply=_allocation(verdict["apply"], static),
        proposed=_optional_allocation(verdict["proposed"], static),
        reasons=tuple(GuardReason(reason) for reason in verdict["reasons"]),
        mode=GuardMode(verdict["mode"]),
        exposure=verdict["exposure"],
        fell_back=verdict["fell_back"],
    )


def _optional_allocation(encoded: Any, static: Allocation) -> Allocation | None:
    return None if encoded is None else _allocation(encoded, static)


def _allocation(encoded: Any, static: Allocation) -> Allocation:
    if isinstance(encoded, list):
        return Allocation(**_named(FIELDS["allocation"], encoded))
    return static if encoded == static.version else replace(static, version=int(encoded))


def _named(names: tuple[str, ...], values: list[Any]) -> dict[str, Any]:
    return dict(zip(names, map(_value, values), strict=True))


def _value(encoded: Any) -> Any:
    if encoded is None:
        return math.nan
    if isinstance(encoded, list):
        return tuple(map(_value, encoded))
    if isinstance(encoded, str):
        return float(encoded)
    return encoded


def _settings_of(settings: GuardSettings) -> dict[str, object]:
    return {field.name: getattr(settings, field.name) for field in fields(settings)}


def _plain(values: tuple[Any, ...]) -> list[object]:
    """Values of a vector for JSON, which knows neither NaN nor infinity."""
    return [_plain_value(value) for value in values]


def _plain_value(value: Any) -> object:
    if isinstance(value, tuple):
        return _plain(value)
    if isinstance(value, float):
        # Compared rather than asked: this runs some hundred times an entry.
        if value != value:
            return None
        if value in (math.inf, -math.inf):
            return str(float(value))
    return value


def _scalar(value: Any) -> object:
    """A number of numpy as Python's."""
    item = getattr(value, "item", None)
    if item is None:
        raise TypeError(f"{type(value).__name__} has no JSON form")
    return item()

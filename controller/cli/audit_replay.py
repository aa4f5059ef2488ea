"""`trimtab whatif --audit`: recorded decisions decided again, and what another policy had wished.

The replay itself is `trimtab.training.whatif.audit_replay`.
"""

from __future__ import annotations

import json as json_text
import math
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trimtab.engine_bridge.errors import TrimtabError

if TYPE_CHECKING:
    from trimtab.training.whatif.audit_replay import RunReplay
    from trimtab.training.whatif.open_loop import OpenLoopResult

SCHEMA = 1
_OPEN_LOOP = (
    "In open loop: {policy} was shown the telemetry of what was applied. Had it acted, the "
    "telemetry would have been another one, and so would its next wishes."
)


class AuditDiffersError(TrimtabError):
    """A decision came out otherwise than it was recorded, or none could be decided again."""


def replay_audit(paths: Sequence[Path], *, policies: Sequence[str], json: Path | None) -> None:
    """Decide recorded decisions again, print what came of it, fail on the first that differs.

    Args:
        paths: Audit files, or folders of them.
        policies: Policies to ask beside the recorded one; their bundles are looked at first for
            what was recorded.
        json: Where to write the result for machines.

    Raises:
        AuditDiffersError: a decision came out otherwise, or there was none to compare.
        AuditError: a file is damaged, or a recorded bundle is not to be found.
    """
    from trimtab.agents.audit_read import read_audit
    from trimtab.controller.cli.study import check_outputs
    from trimtab.engine_bridge.atomic import write_text
    from trimtab.training.whatif.audit_policies import RecordedPolicies
    from trimtab.training.whatif.audit_replay import replay

    check_outputs({"--json": json}, inputs=[path for path in paths if path.is_file()])
    known = RecordedPolicies(policies)
    replays = []
    for run in read_audit(paths):
        found = replay(run, known, known.given)
        # A policy that was given to find what was recorded is no other one.
        found.others = [one for one in found.others if known.is_other(one.policy)]
        replays.append(found)
        _print(found)
    if json is not None:
        write_text(json, json_text.dumps(_content(paths, replays), indent=1) + "\n")
        print(f"json: {json}")
    _judge(replays)


def _judge(replays: Sequence[RunReplay]) -> None:
    wrong = next((one for one in replays if one.difference is not None), None)
    replayed = sum(one.replayed for one in replays)
    if wrong is not None and (first := wrong.difference) is not None:
        raise AuditDiffersError(
            f"{first.where}: decision {first.number} of engine {wrong.engine}: {first.knob}: "
            f"{_shown(first.recorded)} was recorded, {_shown(first.replayed)} is decided now; "
            f"{replayed - sum(one.equal for one in replays):,} of {replayed:,} differ"
        )
    if not replayed:
        raise AuditDiffersError("no decision could be replayed: none has a verdict and a beginning")


def _print(found: RunReplay) -> None:
    begin, end = (_time(unix_s) for unix_s in (found.from_unix_s, found.to_unix_s))
    print(f"engine {found.engine}, {found.policy}, {begin} to {end} (run {found.run})")
    print(f"  {found.replayed:,} decisions replayed, {found.equal:,} equal bit for bit")
    without = found.ticks - found.replayed - found.skipped
    if without:
        print(f"  {without:,} ticks without a verdict: no telemetry, or not in control")
    if found.skipped:
        print(f"  {found.skipped:,} not replayed: entries before them are lost or deleted")
    if found.policy_errors:
        print(f"  {found.policy_errors:,} recorded failures of the policy were raised again")
    for path in found.torn:
        print(f"  {path} ends with half a line: the daemon was killed, or is writing it")
    if (first := found.difference) is not None:
        print(f"  first difference: decision {first.number} at {_time(first.unix_s)}, {first.knob}")
        print(f"    recorded {_shown(first.recorded)}, replayed {_shown(first.replayed)}")
        print(f"    recorded with {_versions(found.versions)}, replayed with {_versions(_own())}")
    for other in found.others:
        _print_other(other)


def _print_other(other: OpenLoopResult) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    silent = f", gave nothing at {other.failed:,}" if other.failed else ""
    print(
        f"  {other.policy} instead would have asked for something else at {other.elsewhere:,} of "
        f"{other.decisions:,} decisions{silent}"
    )
    print(
        f"  mean distance from static: {other.distance_mean:.3f}, "
        f"{other.asked_distance_mean:.3f} as it was"
    )
    moved = {
        name: knob
        for name, knob in other.knobs.items()
        if not _close(knob.asked, knob.static) or not _close(knob.wished, knob.static)
    }
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("mean of", no_wrap=True)
    for name in ("static", "asked for", "instead"):
        table.add_column(name, justify="right", no_wrap=True)
    for name, knob in moved.items():
        table.add_row(name, *(f"{value:,.6g}" for value in (knob.static, knob.asked, knob.wished)))
    if moved:
        Console(highlight=False).print(table)
    print(f"  {_OPEN_LOOP.format(policy=other.policy)}")


def _close(one: float, other: float) -> bool:
    """Equal but for the rounding of a mean; what was never given is nowhere."""
    return math.isnan(one) or math.isclose(one, other, rel_tol=1e-9)


def _content(paths: Sequence[Path], replays: Sequence[RunReplay]) -> dict[str, object]:
    return {
        "schema": SCHEMA,
        "audit": [str(path) for path in paths],
        "versions": _own(),
        "replayed": sum(one.replayed for one in replays),
        "equal": sum(one.equal for one in replays),
        "runs": [_plain(asdict(one)) for one in replays],
    }


def _plain(value: Any) -> Any:
    """For JSON, which knows no NaN and no infinity."""
    if isinstance(value, dict):
        return {name: _plain(entry) for name, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _shown(value: object) -> str:
    if isinstance(value, tuple):
        return ", ".join(map(str, value)) or "none"
    return repr(value) if isinstance(value, float) else str(value)


def _time(unix_s: float) -> str:
    return datetime.fromtimestamp(unix_s, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def _versions(versions: Any) -> str:
    return ", ".join(f"{name} {number}" for name, number in versions.items()) or "unknown versions"


def _own() -> dict[str, str]:
    from trimtab.agents.audit_entry import own_versions

    return dict(own_versions())

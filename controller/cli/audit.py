"""`trimtab audit`: the daemon's decisions as a table for people.

What a row says is `audit_rows`' business; deciding again is `trimtab whatif --audit`.
"""

from __future__ import annotations

import json as json_text
import re
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from trimtab.engine_bridge.errors import FlagError, did_you_mean

if TYPE_CHECKING:
    from trimtab.agents.audit_read import AuditRun, Part
    from trimtab.controller.cli.audit_rows import Row

SCHEMA: Final = 1
_DEFAULT_LAST: Final = 40
_LOOK_S: Final = 0.5
_BLOCK_LINES: Final = 1000
_ANY: Final = "any"
_UNITS: Final = {"s": 1, "m": 60, "h": 3600, "d": 86_400}

Paths = Annotated[
    list[Path], typer.Argument(help="Audit files or folders: audit in the daemon's state_dir.")
]
Engine = Annotated[str | None, typer.Option("--engine", help="Only this engine's.")]
Reasons = Annotated[
    str | None,
    typer.Option(
        "--reasons", help="Only decisions with one of these reasons, comma-separated, or any."
    ),
]
Since = Annotated[
    str | None,
    typer.Option("--since", help="Only from then on: 30m, 2h, 1d ago, or a time like "
                 "2026-11-30T12:00 (UTC)."),
]  # fmt: skip
Last = Annotated[
    int,
    typer.Option("--last", help="So many rows at most, the newest; 0 for all of them."),
]
Follow = Annotated[bool, typer.Option("--follow", "-f", help="Go on with what is written next.")]
Json = Annotated[Path | None, typer.Option("--json", help="Write the entries for machines.")]


def register(app: typer.Typer) -> None:
    """Add the command to the command line."""
    app.command("audit")(audit)


def audit(
    paths: Paths,
    engine: Engine = None,
    reasons: Reasons = None,
    since: Since = None,
    last: Last = _DEFAULT_LAST,
    follow: Follow = False,
    json: Json = None,
) -> None:
    """Show what a daemon decided and why; equal ticks in a row are one line.

    Whether it would be decided again is what whatif --audit says.
    """
    from trimtab.agents.audit_read import read_audit
    from trimtab.controller.cli.audit_rows import grouped, header, line
    from trimtab.controller.cli.study import check_outputs

    if last < 0:
        raise FlagError("--last", value=last, bound="at least 0")
    if follow and json is not None:
        raise FlagError("--json", bound="left out with --follow", remedy="take one of the two")
    check_outputs({"--json": json}, inputs=[path for path in paths if path.is_file()])
    wanted = _Wanted(reasons=_reasons(reasons), since_s=_since(since, time.time()))
    runs = read_audit(paths, engine=engine)
    with_engine = len({run.engine for run in runs}) > 1
    rows = newest(runs, wanted, last)
    if json is not None:
        _write(json, rows)
    print(header(with_engine=with_engine))
    for row in grouped(rows):
        print(line(row, with_engine=with_engine))
    if json is not None:
        print(f"json: {json}")
    if follow:
        for row in followed(paths, runs, engine=engine, wait=time.sleep):
            if wanted.takes(row):
                print(line(row, with_engine=with_engine), flush=True)


class _Wanted:
    """Which rows are shown."""

    def __init__(self, *, reasons: frozenset[str] | None, since_s: float) -> None:
        self._reasons, self.since_s = reasons, since_s

    def takes(self, row: Row) -> bool:
        if row.unix_s < self.since_s:
            return False
        return self._reasons is None or bool(self._reasons.intersection(row.reasons))


def newest(runs: Sequence[AuditRun], wanted: _Wanted, last: int) -> list[Row]:
    """The newest rows of all runs, oldest first.

    Args:
        runs: What was read.
        wanted: Which rows count.
        last: So many at most, after equal ones were put together; 0 for all of them.
    """
    from trimtab.controller.cli.audit_rows import grouped

    found: list[Row] = []
    for name in dict.fromkeys(run.engine for run in runs):
        kept: list[Row] = []
        # From the newest part backwards: a log may be a gigabyte, and a screen is not.
        for part in reversed([part for run in runs if run.engine == name for part in run.parts]):
            kept = _newest_of(part, wanted, last) + kept
            begun_s = float(part.start["unix_s"])
            if begun_s < wanted.since_s or _enough(kept, last):
                break
        found += kept
    found.sort(key=lambda row: row.unix_s)
    if not last:
        return found
    shown = deque(grouped(found), maxlen=last)
    return found[-sum(row.ticks for row in shown) :] if shown else []


def _newest_of(part: Part, wanted: _Wanted, last: int) -> list[Row]:
    """The rows of a part that count: its newest, as far back as they may be needed."""
    lines = _BLOCK_LINES if last or wanted.since_s else None
    while True:
        entries = list(part.entries(last=lines))
        rows = list(_rows(entries, part))
        kept = [row for row in rows if wanted.takes(row)]
        if lines is None or len(entries) < lines:
            return kept
        if _enough(kept, last) or (rows and rows[0].unix_s < wanted.since_s):
            return kept
        lines = 4 * lines


def _enough(rows: Sequence[Row], last: int) -> bool:
    """Whether so many rows are more than are shown."""
    from trimtab.controller.cli.audit_rows import grouped

    return bool(last) and sum(1 for _ in grouped(rows)) > last


def followed(
    paths: Sequence[Path],
    runs: Sequence[AuditRun],
    *,
    engine: str | None,
    wait: Callable[[float], None],
) -> Iterator[Row]:
    """Rows of what is written from now on, for ever, in further files too.

    Args:
        paths: As they were given.
        runs: What was read already.
        engine: Only this engine's; None for all.
        wait: Waits for so many seconds.
    """
    from trimtab.agents.audit_entry import START
    from trimtab.agents.audit_read import AuditTail, audit_files
    from trimtab.controller.cli.audit_rows import RowMaker

    tails: dict[Path, AuditTail] = {}
    makers: dict[Path, RowMaker] = {}
    for run in runs:
        for part in run.parts:
            tails[part.path] = AuditTail(path=part.path, offset=part.end)
            makers[part.path] = RowMaker(run.engine)
            makers[part.path].row(str(part.path), part.start)
    while True:
        wait(_LOOK_S)
        for path in audit_files(paths):
            for where, entry in tails.setdefault(path, AuditTail(path=path)).entries():
                if entry["kind"] == START:
                    makers[path] = RowMaker(str(entry["engine"]))
                row = makers[path].row(where, entry)
                if row is not None and engine in (None, row.engine):
                    yield row


def _rows(entries: Iterable[tuple[str, dict[str, object]]], part: Part) -> Iterator[Row]:
    from trimtab.controller.cli.audit_rows import RowMaker

    maker = RowMaker(str(part.start["engine"]))
    maker.row(str(part.path), part.start)
    for where, entry in entries:
        row = maker.row(where, entry)
        if row is not None:
            yield row


def _write(path: Path, rows: Sequence[Row]) -> None:
    from trimtab.engine_bridge.atomic import write_text

    found = [{"engine": row.engine, **(row.content or {})} for row in rows]
    write_text(path, json_text.dumps({"schema": SCHEMA, "entries": found}, indent=1) + "\n")


def _reasons(text: str | None) -> frozenset[str] | None:
    from trimtab.agents.verdict import GuardReason

    if text is None:
        return None
    names = [str(reason) for reason in GuardReason]
    if text.strip() == _ANY:
        return frozenset(names)
    asked = [name.strip() for name in text.split(",")]
    for name in asked:
        if name not in names:
            raise FlagError(
                "--reasons",
                value=name,
                bound=f"{_ANY}, or of {', '.join(names)}",
                remedy=did_you_mean(name, [*names, _ANY]),
            )
    return frozenset(asked)


def _since(text: str | None, now_s: float) -> float:
    """Seconds since 1970; 0 for all there is."""
    if text is None:
        return 0.0
    ago = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd])", text.strip())
    if ago is not None:
        return now_s - float(ago[1]) * _UNITS[ago[2]]
    try:
        then = datetime.fromisoformat(text.strip())
    except ValueError:
        raise FlagError(
            "--since", value=text, bound="like 30m, 2h, 1d or 2026-11-30T12:00"
        ) from None
    return (then if then.tzinfo else then.replace(tzinfo=UTC)).timestamp()

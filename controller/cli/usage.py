"""`trimtab usage`: sums the gateway's accounts by tenant, tier or day."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from trimtab.engine_bridge.errors import FlagError, did_you_mean

_SPAN: Final = re.compile(r"(\d+)([mhd])")
_UNITS: Final = {"m": "minutes", "h": "hours", "d": "days"}

Folder = Annotated[Path, typer.Argument(help="The gateway's usage_dir.")]
By = Annotated[str, typer.Option("--by", help="tenant, tier, model, engine or day.")]
Since = Annotated[
    str | None,
    typer.Option("--since", help="Date or time (2026-11-30, 2026-11-30T12:00Z), or 90m, 24h, 7d."),
]
Until = Annotated[str | None, typer.Option("--until", help="Likewise; without it: up to now.")]
Json = Annotated[Path | None, typer.Option("--json", help="Write the sums here, too.")]


def register(app: typer.Typer) -> None:
    """Add the command to the command line."""
    app.command("usage")(usage)


def usage(
    folder: Folder,
    by: By = "tenant",
    since: Since = None,
    until: Until = None,
    json: Json = None,
) -> None:
    """Print what requests took: tokens in, cached and out, GPU time, by tenant, tier or day."""
    from trimtab.engine_bridge.gateway.account_sums import GROUPINGS, sum_accounts

    if by not in GROUPINGS:
        raise FlagError(
            "--by", value=by, bound=f"one of {', '.join(GROUPINGS)}",
            remedy=did_you_mean(by, GROUPINGS),
        )  # fmt: skip
    now = datetime.now(UTC)
    sums = sum_accounts(
        folder,
        by=by,
        since_s=_time_s("--since", since, now),
        until_s=_time_s("--until", until, now),
    )
    _print(by, {name: one.as_json() for name, one in sums.items()})
    if json is not None:
        _write(json, by, {name: one.as_json() for name, one in sums.items()})


def _time_s(flag: str, text: str | None, now: datetime) -> float | None:
    """Seconds since 1970 of a date, a time, or a span before now; times are UTC without a zone."""
    if text is None:
        return None
    span = _SPAN.fullmatch(text)
    try:
        if span is not None:
            return (now - timedelta(**{_UNITS[span[2]]: int(span[1])})).timestamp()
        found = datetime.fromisoformat(text)
    except (ValueError, OverflowError):
        raise FlagError(
            flag, value=text, bound="a date, a time, or a span such as 90m, 24h, 7d"
        ) from None
    return (found if found.tzinfo is not None else found.replace(tzinfo=UTC)).timestamp()


def _print(by: str, sums: dict[str, dict[str, Any]]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD)
    table.add_column(by, overflow="fold")
    for heading in ("requests", "finished", "refused", "prompt", "cached", "output", "GPU s"):
        table.add_column(heading, justify="right")
    for name, one in sums.items():
        table.add_row(
            name or "-",
            *(f"{one[key]:,}" for key in ("requests", "finished", "refused")),
            *(f"{one[f'{key}_tokens']:,}" for key in ("prompt", "cached", "output")),
            f"{one['gpu_ms'] / 1000:,.1f}",
        )
    Console().print(table)


def _write(path: Path, by: str, sums: dict[str, dict[str, Any]]) -> None:
    import json

    from trimtab.engine_bridge.atomic import write_text

    write_text(path, json.dumps({"schema": 1, "by": by, "sums": sums}, indent=1) + "\n")

"""`trimtab profile`: who sent what in a stretch of an engine's traffic log.

It parses flags and prints; the work is `trimtab.training.profile`'s.
"""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Annotated

import typer

from trimtab.engine_bridge.errors import FlagError

_LONGEST_S = 7 * 86_400.0


def register(app: typer.Typer) -> None:
    """Add the command to the command line."""
    app.command("profile")(profile)


def profile(
    traffic_log: Annotated[Path, typer.Option("--traffic-log", help="Folder of the traffic log.")],
    out: Annotated[
        Path, typer.Option("--out", help="Folder for trace.parquet, profile.json, profile.html.")
    ],
    since: Annotated[
        str | None,
        typer.Option(
            "--since",
            help="Start of the window: seconds since 1970, or a time like 2026-11-30T12:00:00Z. "
            "Left out, the window ends with the newest request.",
        ),
    ] = None,
    seconds: Annotated[float, typer.Option("--seconds", help="Length of the window.")] = 120.0,
    before_s: Annotated[
        float,
        typer.Option("--before-s", help="Compare with so many seconds before it; 0: with nothing."),
    ] = 600.0,
    alert: Annotated[
        Path | None, typer.Option("--alert", help="What the daemon saw, as it writes it.")
    ] = None,
) -> None:
    """Say who sent what in a window of an engine's traffic log, and what has changed.

    The trace that it writes is the window's traffic, for trimtab whatif.
    """
    if not 1.0 <= seconds <= _LONGEST_S:
        raise FlagError("--seconds", value=seconds, bound=f"from 1 to {_LONGEST_S:,.0f}")
    if not 0.0 <= before_s <= _LONGEST_S:
        raise FlagError("--before-s", value=before_s, bound=f"from 0 to {_LONGEST_S:,.0f}")
    if out.exists() and not out.is_dir():
        raise FlagError("--out", value=str(out), bound="a folder")
    since_unix_s = None if since is None else unix_s(since)
    from trimtab.training.profile.profile import PAGE, make_profile, read_alert, write_profile

    found = make_profile(
        traffic_log,
        since_unix_s=since_unix_s,
        window_s=seconds,
        before_s=before_s,
        alert=None if alert is None else read_alert(alert),
    )
    write_profile(found, out)
    window, before = found.content["window"], found.content["before"]
    print(
        f"{window['requests']:,} requests in {window['seconds']:g} s, "
        f"{before['requests']:,} in the {before['seconds']:.0f} s before"
    )
    for row in found.content["who"][:5]:
        print(
            f"  {row['tenant']} in {row['tier']}: {row['requests_per_s']:.2f} requests/s, "
            f"{row['demand_share']:.0%} of the demand"
        )
    print(f"wrote {out / PAGE}")
    print(found.cause.sentence)


def unix_s(text: str) -> float:
    """Seconds since 1970 of a number or an ISO time; a time without a zone is UTC."""
    try:
        value = float(text)
    except ValueError:
        try:
            moment = datetime.datetime.fromisoformat(text)
        except ValueError:
            raise FlagError(
                "--since",
                value=text,
                bound="seconds since 1970 or a time like 2026-11-30T12:00:00Z",
            ) from None
        if moment.tzinfo is None:
            moment = moment.replace(tzinfo=datetime.UTC)
        value = moment.timestamp()
    if not 0.0 <= value <= 1e11:
        raise FlagError("--since", value=text, bound="from 0 to 1e11 seconds since 1970")
    return value

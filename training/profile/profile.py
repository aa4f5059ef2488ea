"""Makes a traffic profile: reads the log, counts, names the cause, writes three files.

`trace.parquet` (a trace that what-if reads), `profile.json` and `profile.html`.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from trimtab.engine_bridge.errors import FlagError
from trimtab.training.profile import figures
from trimtab.training.profile.cause import Cause, find_cause
from trimtab.training.profile.logged import Logged, read_logged
from trimtab.training.profile.page import render
from trimtab.training.traces.canonical_write import replacing, write_json, write_trace

SCHEMA: Final = 1
TRACE, JSON, PAGE = "trace.parquet", "profile.json", "profile.html"
_LARGEST_ALERT_BYTES: Final = 65_536


@dataclass(frozen=True, kw_only=True)
class Profile:
    """What was found out about a window of traffic."""

    logged: Logged
    cause: Cause
    content: dict[str, Any]
    """The profile for machines: what `profile.json` holds."""


def make_profile(
    folder: Path,
    *,
    since_unix_s: float | None,
    window_s: float,
    before_s: float,
    alert: dict[str, Any] | None = None,
) -> Profile:
    """Profile a window of a traffic log.

    Args:
        folder: Folder of the log.
        since_unix_s: Start of the window, seconds since 1970; None: it ends with the log.
        window_s: Its length, seconds.
        before_s: How far to look back before it, seconds.
        alert: What the daemon saw, as it writes it; None: nobody asked on an alert's behalf.

    Raises:
        TraceError: there is no log, or no request in the window.
    """
    logged = read_logged(folder, since_unix_s=since_unix_s, window_s=window_s, before_s=before_s)
    compared = figures.compare(logged)
    cause = find_cause(logged, compared, unfinished=_unfinished(alert))
    now = int(logged.in_window.sum())
    content: dict[str, Any] = {
        "schema": SCHEMA,
        "alert": alert,
        "window": {
            "since_unix_s": logged.since_unix_s,
            "seconds": logged.window_s,
            "requests": now,
            "outcomes": figures.outcomes(logged),
            "lost_rows": logged.lost_rows,
        },
        "before": {"seconds": logged.before_s, "requests": len(logged.trace) - now},
        "ttft_ms": figures.first_tokens(logged),
        "who": figures.who(compared),
        "lengths": figures.lengths(logged),
        "longest": figures.longest(logged),
        "bursts": figures.bursts(logged),
        "prefixes": figures.prefixes(logged),
        "cause": asdict(cause),
    }
    return Profile(logged=logged, cause=cause, content=content)


def write_profile(profile: Profile, folder: Path) -> None:
    """Write the three files, each whole or not at all; the folder is made if need be.

    Raises:
        TraceError: a file cannot be written.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    write_trace(profile.logged.window_trace(), folder / TRACE)
    write_json(_finite(profile.content), folder / JSON)
    with replacing(folder / PAGE) as partial:
        partial.write_text(render(profile.logged, profile.content), encoding="utf-8")


def read_alert(path: Path) -> dict[str, Any]:
    """What the daemon has written down of an alert.

    Raises:
        FlagError: the file is no JSON object.
    """
    try:
        with path.open("rb") as file:
            found = json.loads(file.read(_LARGEST_ALERT_BYTES))
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise FlagError("--alert", value=str(path), bound="a file with one JSON object")
    return found


def _unfinished(alert: dict[str, Any] | None) -> int:
    counts = [(alert or {}).get(key) for key in ("waiting", "running")]
    return sum(
        int(value)
        for of_tier in counts
        if isinstance(of_tier, dict)
        for value in of_tier.values()
        if isinstance(value, int)
    )


def _finite(value: Any) -> Any:
    """JSON knows no NaN and no infinity: they become null."""
    if isinstance(value, dict):
        return {key: _finite(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [_finite(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value

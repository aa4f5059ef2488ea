"""`trimtab usage`: sums the gateway's accounts by tenant, tier or day, and prices the GPU time."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from trimtab.engine_bridge.errors import FlagError, did_you_mean

_DEFAULT_ENGINE: Final = "h100:llama-3.1-8b-tp1"
_MS_PER_HOUR: Final = 3.6e6
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
Cost = Annotated[
    bool,
    typer.Option(
        "--cost",
        help="Price the GPU time, too: compute alone, without idle time and reserves, so that it "
        "does not sum to the bill.",
    ),
]
Plan = Annotated[
    str | None,
    typer.Option("--plan", help="With --cost: the plan whose engine.cost_per_hour is the price."),
]
Engine = Annotated[
    str | None,
    typer.Option(
        "--engine",
        help="With --cost: what that price is for (how many GPUs), and the price where the plan "
        f"states none; {_DEFAULT_ENGINE} if left out.",
    ),
]


def register(app: typer.Typer) -> None:
    """Add the command to the command line."""
    app.command("usage")(usage)


def usage(
    folder: Folder,
    by: By = "tenant",
    since: Since = None,
    until: Until = None,
    json: Json = None,
    cost: Cost = False,
    plan: Plan = None,
    engine: Engine = None,
) -> None:
    """Print what requests took: tokens in, cached and out, GPU time, by tenant, tier or day."""
    from trimtab.engine_bridge.gateway.account_sums import GROUPINGS, sum_accounts

    if by not in GROUPINGS:
        raise FlagError(
            "--by", value=by, bound=f"one of {', '.join(GROUPINGS)}",
            remedy=did_you_mean(by, GROUPINGS),
        )  # fmt: skip
    for flag, given in (("--plan", plan), ("--engine", engine)):
        if given is not None and not cost:
            raise FlagError(flag, bound="left out without --cost")
    price = _usd_per_gpu_hour(plan, engine) if cost else None
    now = datetime.now(UTC)
    sums = sum_accounts(
        folder,
        by=by,
        since_s=_time_s("--since", since, now),
        until_s=_time_s("--until", until, now),
    )
    told = {name: one.as_json() for name, one in sums.items()}
    if price is not None:
        for one in told.values():
            one["compute_usd"] = one["gpu_ms"] / _MS_PER_HOUR * price
    _print(by, told, price)
    if json is not None:
        _write(json, by, told, price)


def _usd_per_gpu_hour(plan: str | None, engine: str | None) -> float:
    """What an hour of one GPU costs: the plan's price of an engine over the engine's GPUs."""
    from trimtab.engine_bridge.engine_spec import get_engine_spec
    from trimtab.engine_bridge.plan import load_plan

    spec = get_engine_spec(_DEFAULT_ENGINE if engine is None else engine)
    stated = load_plan(plan).engine.cost_per_hour
    return (spec.cost_per_hour if stated is None else stated) / spec.tp


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


def _print(by: str, sums: dict[str, dict[str, Any]], usd_per_gpu_hour: float | None) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD)
    table.add_column(by, overflow="fold")
    for heading in ("requests", "finished", "refused", "prompt", "cached", "output", "GPU s"):
        table.add_column(heading, justify="right")
    if usd_per_gpu_hour is not None:
        table.add_column("USD", justify="right")
    for name, one in sums.items():
        table.add_row(
            name or "-",
            *(f"{one[key]:,}" for key in ("requests", "finished", "refused")),
            *(f"{one[f'{key}_tokens']:,}" for key in ("prompt", "cached", "output")),
            f"{one['gpu_ms'] / 1000:,.1f}",
            *([] if usd_per_gpu_hour is None else [f"{one['compute_usd']:,.4f}"]),
        )
    console = Console()
    console.print(table)
    if usd_per_gpu_hour is not None:
        console.print(
            f"Compute at {usd_per_gpu_hour:g} USD an hour of one GPU, without idle time and "
            "reserves.",
            style="dim",
        )


def _write(
    path: Path, by: str, sums: dict[str, dict[str, Any]], usd_per_gpu_hour: float | None
) -> None:
    import json

    from trimtab.engine_bridge.atomic import write_text

    priced = {} if usd_per_gpu_hour is None else {"usd_per_gpu_hour": usd_per_gpu_hour}
    content = {"schema": 1, "by": by, **priced, "sums": sums}
    write_text(path, json.dumps(content, indent=1) + "\n")

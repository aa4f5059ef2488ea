"""The commands `trimtab trace info|convert|compose|generate`.

It parses flags and prints; reading, composing and generating are in `trimtab.training.traces`.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from trimtab.engine_bridge.engine_spec import EngineSpec
    from trimtab.engine_bridge.trace import Trace
    from trimtab.training.traces.options import ReadOptions

traces = typer.Typer(
    name="trace",
    help="Read, convert, compose and make traces: recorded or synthetic traffic.",
    no_args_is_help=True,
)

Seed = Annotated[int, typer.Option("--seed", help="Of everything that is drawn.")]
Out = Annotated[Path, typer.Option("--out", help="File to write, .parquet or .csv.")]
Format = Annotated[
    str | None, typer.Option("--format", help="Format; chosen from the content if left out.")
]
Json = Annotated[Path | None, typer.Option("--json", help="Write the result to this file, too.")]
MaxContext = Annotated[
    int, typer.Option("--max-context-tokens", help="Cut agent sessions at this context, tokens.")
]
MaxIdle = Annotated[float, typer.Option("--max-idle-s", help="Cut agents' pauses to this.")]
SessionWindow = Annotated[
    float, typer.Option("--session-window-s", help="Draw agents' starts from so many seconds.")
]
WindowStart = Annotated[
    float | None,
    typer.Option(
        "--window-start-s", help="Part of ServeGen's 14 days; an average one if left out."
    ),
]
Window = Annotated[float, typer.Option("--window-s", help="Length of that part, seconds.")]
Rate = Annotated[
    float | None, typer.Option("--rate-per-s", help="Mean rate of all ServeGen clients together.")
]
TokensPerImage = Annotated[
    int, typer.Option("--tokens-per-image", help="Tokens of an image in Azure's LMM trace.")
]


def register(app: typer.Typer) -> None:
    """Add the command `trace` to the command line."""
    app.add_typer(traces)


@traces.command()
def info(
    file: Annotated[Path, typer.Argument(help="Trace file, or directory of one trace.")],
    json_file: Json = None,
    format: Format = None,
    engine: Annotated[
        str | None, typer.Option("--engine", help="Add the load that it offers to this engine.")
    ] = None,
    seed: Seed = 0,
    max_context_tokens: MaxContext = 131_072,
    max_idle_s: MaxIdle = 900.0,
    session_window_s: SessionWindow = 3600.0,
    window_start_s: WindowStart = None,
    window_s: Window = 3600.0,
    rate_per_s: Rate = None,
    tokens_per_image: TokensPerImage = 255,
) -> None:
    """Summarise a trace: rows, rate, burstiness, tokens, tenants, sessions, what was changed."""
    from trimtab.training.traces.canonical_write import check_json_out, write_json
    from trimtab.training.traces.describe import describe
    from trimtab.training.traces.formats import detect_format

    if json_file is not None:
        check_json_out(json_file)
    spec = _spec(engine)
    options = _options(
        max_context_tokens,
        max_idle_s,
        session_window_s,
        window_start_s,
        window_s,
        rate_per_s,
        tokens_per_image,
    )
    trace = _read(file, format, seed, options)
    summary: dict[str, Any] = {
        "schema": 1,
        "file": str(file),
        "format": format or detect_format(file),
        **describe(trace),
    }
    if spec is not None:
        summary["engine"] = spec.name
        summary["offered_load"] = _offered(trace, spec)
    if json_file is not None:
        write_json(summary, json_file)
    _print_summary(summary)


@traces.command()
def convert(
    file: Annotated[Path, typer.Argument(help="Trace file, or directory of one trace.")],
    out: Out,
    format: Format = None,
    tier: Annotated[str, typer.Option("--tier", help="Tier of every row without one.")] = "T0",
    tenant: Annotated[
        str | None, typer.Option("--tenant", help="Tenant of every row without one.")
    ] = None,
    seed: Seed = 0,
    max_context_tokens: MaxContext = 131_072,
    max_idle_s: MaxIdle = 900.0,
    session_window_s: SessionWindow = 3600.0,
    window_start_s: WindowStart = None,
    window_s: Window = 3600.0,
    rate_per_s: Rate = None,
    tokens_per_image: TokensPerImage = 255,
) -> None:
    """Convert a trace of any known format to Trimtab's Parquet or CSV form."""
    from trimtab.training.traces.canonical_write import check_out, write_trace

    check_out(out)
    options = _options(
        max_context_tokens,
        max_idle_s,
        session_window_s,
        window_start_s,
        window_s,
        rate_per_s,
        tokens_per_image,
    )
    trace = _read(file, format, seed, options, tier=tier, tenant=tenant)
    write_trace(trace, out)
    _print_written(trace, out)


@traces.command()
def compose(
    out: Out,
    tier: Annotated[
        list[str],
        typer.Option("--tier", help="TIER=FILE, for instance T0=azure.csv; may be repeated."),
    ],
    load: Annotated[
        float | None,
        typer.Option("--load", help="Offered load, share of the engine's capacity; else as it is."),
    ] = None,
    engine: Annotated[
        str | None, typer.Option("--engine", help="Engine whose capacity --load is a share of.")
    ] = None,
    format: Annotated[
        list[str] | None, typer.Option("--format", help="TIER=FORMAT, where the content misleads.")
    ] = None,
    share: Annotated[
        list[str] | None,
        typer.Option("--share", help="TIER=FRACTION of the load; default .45 .25 .20 .10."),
    ] = None,
    offset: Annotated[
        list[str] | None, typer.Option("--offset", help="TIER=SECONDS after which it begins.")
    ] = None,
    tenants: Annotated[
        list[str] | None, typer.Option("--tenants", help="TIER=COUNT of unequal tenants.")
    ] = None,
    duration_s: Annotated[
        float | None,
        typer.Option("--duration-s", help="Span; default the shortest part's, an hour at most."),
    ] = None,
    seed: Seed = 0,
    max_context_tokens: MaxContext = 131_072,
    max_idle_s: MaxIdle = 900.0,
    window_start_s: WindowStart = None,
    window_s: Window = 3600.0,
    tokens_per_image: TokensPerImage = 255,
) -> None:
    """Compose a multi-tenant trace out of several, at a chosen share of an engine's capacity."""
    import numpy as np

    from trimtab.training.traces import compose as composing
    from trimtab.training.traces import part_files as reading
    from trimtab.training.traces.canonical_write import check_out, write_trace

    check_out(out)
    spec = _load_flags(load, engine)
    choices = reading.PartChoices(
        formats=reading.assignments("--format", format or (), lambda _, text: text),
        offsets_s=reading.assignments("--offset", offset or (), reading.number),
        tenants=reading.assignments("--tenants", tenants or (), reading.tenant_count),
    )
    shares = reading.assignments("--share", share or (), reading.number)
    options = _options(
        max_context_tokens, max_idle_s, 3600.0, window_start_s, window_s, None, tokens_per_image
    )
    rng = np.random.default_rng(_seed(seed))
    found = reading.read_parts(tier, choices, rng=rng, options=options, duration_s=duration_s)
    trace = composing.compose(
        found, load=load, spec=spec, rng=rng, duration_s=duration_s, shares=shares
    )
    write_trace(trace, out)
    _print_written(trace, out, spec)


@traces.command()
def generate(
    out: Out,
    hours: Annotated[float, typer.Option("--hours", help="Length of the trace.")] = 1.0,
    seed: Seed = 0,
    preset: Annotated[
        str, typer.Option("--preset", help="What happens; see docs/traces.md.")
    ] = "demo",
    load: Annotated[
        float | None, typer.Option("--load", help="Offered load, share of the engine's capacity.")
    ] = None,
    engine: Annotated[
        str | None, typer.Option("--engine", help="Engine whose capacity --load is a share of.")
    ] = None,
    media_share: Annotated[
        float,
        typer.Option("--media-share", help="Part of chat and agent turns with images or audio."),
    ] = 0.0,
) -> None:
    """Make synthetic traffic that is not stationary: day curve, bursts, waves, mix shifts."""
    from trimtab.training.traces.canonical_write import check_out, write_trace
    from trimtab.training.traces.generate import DEFAULT_ENGINE
    from trimtab.training.traces.generate import generate as make

    check_out(out)
    spec = _load_flags(load, engine or (DEFAULT_ENGINE if load is not None else None))
    trace = make(
        hours=hours,
        seed=_seed(seed),
        preset=preset,
        load=load,
        spec=spec,
        media_share=media_share,
    )
    write_trace(trace, out)
    _print_written(trace, out, spec)


def _load_flags(load: float | None, engine: str | None) -> EngineSpec | None:
    from trimtab.engine_bridge.errors import FlagError

    if load is not None and engine is None:
        raise FlagError(
            "--engine",
            remedy="--load is a share of an engine; name it, for instance h100:llama-3.1-8b-tp1",
        )
    if load is None and engine is not None:
        raise FlagError("--load", remedy="--engine needs the load to aim at, for instance 0.9")
    if load is not None and not 0 < load <= 10:
        raise FlagError("--load", value=load, bound="above 0, at most 10")
    return _spec(engine)


def _spec(engine: str | None) -> EngineSpec | None:
    from trimtab.engine_bridge.engine_spec import get_engine_spec

    return None if engine is None else get_engine_spec(engine)


def _seed(seed: int) -> int:
    from trimtab.engine_bridge.errors import FlagError

    if not 0 <= seed < 2**63:
        raise FlagError("--seed", value=seed, bound="a whole number of at least 0")
    return seed


def _options(
    max_context_tokens: int,
    max_idle_s: float,
    session_window_s: float,
    window_start_s: float | None,
    window_s: float,
    rate_per_s: float | None,
    tokens_per_image: int,
) -> ReadOptions:
    from trimtab.training.traces.options import ReadOptions

    return ReadOptions(
        max_context_tokens=max_context_tokens,
        max_idle_s=max_idle_s,
        session_window_s=session_window_s,
        window_start_s=window_start_s,
        window_s=window_s,
        rate_per_s=rate_per_s,
        tokens_per_image=tokens_per_image,
    )


def _read(
    file: Path,
    format: str | None,
    seed: int,
    options: ReadOptions,
    *,
    tier: str = "T0",
    tenant: str | None = None,
) -> Trace:
    import numpy as np

    from trimtab.training.traces.formats import read_trace

    rng = np.random.default_rng(_seed(seed))
    return read_trace(file, rng=rng, format=format, tier=tier, tenant=tenant, options=options)


def _offered(trace: Trace, spec: EngineSpec) -> float | None:
    from trimtab.engine_bridge.capacity import offered_load

    return offered_load(trace, spec) if trace.duration_s > 0 else None


def _print_written(trace: Trace, out: Path, spec: EngineSpec | None = None) -> None:
    for note in trace.notes:
        typer.echo(note)
    typer.echo(f"{len(trace):,} requests over {trace.duration_s:,.0f} s")
    if spec is not None:
        offered = _offered(trace, spec)
        shown = "not defined: all arrive at once" if offered is None else f"{offered:.3f}"
        typer.echo(f"offered load of {spec.name}: {shown}")
    typer.echo(str(out))


def _print_summary(summary: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    names = ("tier", "requests", "per s", "CV", "prompt\np50", "\np99", "output\np50", "\np99",
             "tenants", "sessions", "reuse")  # fmt: skip
    table = Table(box=None, padding=(0, 0, 0, 1), pad_edge=False)
    for name in names:
        table.add_column(name, justify="left" if name == "tier" else "right", no_wrap=True)
    for name, row in [*summary["tiers"].items(), ("all", summary)]:
        prompt, output = row["prompt_tokens"], row["output_tokens"]
        table.add_row(
            name,
            f"{row['rows']:,}",
            "-" if row["rate_per_s"] is None else f"{row['rate_per_s']:.3g}",
            "-" if row["cv"] is None else f"{row['cv']:.3g}",
            *(f"{tokens[mark]:,.0f}" for tokens in (prompt, output) for mark in ("p50", "p99")),
            f"{row['tenants']:,}",
            f"{row['sessions']:,}",
            f"{100 * row['reusable_prompt_share']:.0f} %",
        )
    Console(highlight=False).print(table)
    typer.echo(
        f"{summary['format']}, {summary['span_s']:,.1f} s, {summary['silent_minutes']} silent "
        f"minutes, digest {summary['digest'][:12]}"
    )
    if summary["media"]["items"]:
        typer.echo(_media_line(summary["media"]))
    if summary.get("offered_load") is not None:
        typer.echo(f"offered load {summary['offered_load']:.3f} of {summary['engine']}")
    for note in summary["notes"]:
        typer.echo(note)


def _media_line(media: dict[str, Any]) -> str:
    kinds = ", ".join(
        f"{name} {found['items']:,} ({found['tokens']:,} tokens)"
        for name, found in media["kinds"].items()
        if found["items"]
    )
    return (
        f"media in {media['requests']:,} requests: {kinds}; {media['distinct']:,} distinct, "
        f"{media['prompt_share']:.0%} of the prompt tokens"
    )

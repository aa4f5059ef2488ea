"""`trimtab frontier`: what a tier's attainment costs, as more or less is reserved for it.

It parses flags, prints and writes files; the runs and the judgement are in
`trimtab.training.economics`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trimtab.controller.cli.bar import forking_bar
from trimtab.controller.cli.whatif import (
    DEFAULT_ENGINE,
    Blocks,
    BlockSize,
    Caching,
    Drain,
    Engine,
    Html,
    Jobs,
    Json,
    MaxSeqs,
    MaxTokens,
    check_fit,
    command_line,
)
from trimtab.engine_bridge.errors import FlagError, TraceError, did_you_mean

if TYPE_CHECKING:
    from rich.table import Table

    from trimtab.engine_bridge.plan import Plan
    from trimtab.engine_bridge.trace import Trace
    from trimtab.training.economics.frontier import Frontier, Point
    from trimtab.training.economics.study import ReserveStudy
    from trimtab.training.economics.sweep import Sweep

DEFAULT_MOVE = "kv+prefill"
_KNOBS = ("kv", "prefill", "weight")
_MOST_POINTS = 101
_MOST_SEEDS = 1000
_MOST_JOBS = 1024
_PIPED_WIDTH = 120

TracePath = Annotated[
    Path | None,
    typer.Option("--trace", help="Recorded traffic; left out, the built-in hour of the demo."),
]
PlanFile = Annotated[str | None, typer.Option("--plan", help="Plan file, or default or published.")]
TierName = Annotated[
    str | None, typer.Option("--tier", help="Whose reserve; left out, the plan's first tier.")
]
Moves = Annotated[
    list[str] | None,
    typer.Option(
        "--move",
        help=f"What is reserved: kv, prefill, weight, or several that move together "
        f"({DEFAULT_MOVE} if left out). Several times: a frontier each.",
    ),
]
Points = Annotated[int, typer.Option("--points", help="Reserves to try, from 0 to 100 %.")]
Seeds = Annotated[
    int, typer.Option("--seeds", help="How many variations of the traffic; the first as recorded.")
]


def register(app: typer.Typer) -> None:
    """Add the command to the command line."""
    app.command("frontier")(frontier)


def frontier(
    trace: TracePath = None,
    plan: PlanFile = None,
    tier: TierName = None,
    move: Moves = None,
    points: Points = 11,
    engine: Engine = DEFAULT_ENGINE,
    seeds: Seeds = 3,
    json: Json = None,
    html: Html = None,
    drain_s: Drain = None,
    jobs: Jobs = None,
    max_num_seqs: MaxSeqs = None,
    max_num_batched_tokens: MaxTokens = None,
    num_gpu_blocks: Blocks = None,
    block_size: BlockSize = None,
    enable_prefix_caching: Caching = None,
) -> None:
    """Say what a tier's attainment costs in everybody's goodput, as its reserve moves."""
    from trimtab.controller.cli.study import Outputs
    from trimtab.engine_bridge.engine_spec import get_engine_spec
    from trimtab.engine_bridge.plan import load_plan
    from trimtab.training.economics.sweep import Sweep
    from trimtab.training.whatif.drafting import check_acceptance, with_draft_lengths
    from trimtab.training.whatif.run import default_drain_s

    limits = {
        "--max-num-seqs": max_num_seqs,
        "--max-num-batched-tokens": max_num_batched_tokens,
        "--num-gpu-blocks": num_gpu_blocks,
        "--block-size": block_size,
    }
    _in_range("--points", points, 2, _MOST_POINTS)
    _in_range("--seeds", seeds, 1, _MOST_SEEDS)
    _in_range("--jobs", jobs, 1, _MOST_JOBS)
    _in_range("--drain-s", drain_s, 0.0, 1e6)
    for flag, limit in limits.items():
        _in_range(flag, limit, 1, 2**31 - 1)
    inputs = [*([trace] if trace else []), *([Path(plan)] if plan else [])]
    Outputs(json=json, html=html).check(inputs=inputs)
    moves = tuple(_move(words) for words in move or [DEFAULT_MOVE])
    given = load_plan(plan)
    spec = get_engine_spec(engine).with_limits(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        num_gpu_blocks=num_gpu_blocks,
        block_size=block_size,
        enable_prefix_caching=enable_prefix_caching,
    )
    traffic = _traffic(trace)
    check_fit(traffic, [given], spec)
    check_acceptance(traffic, spec)
    given = with_draft_lengths(given, spec)
    found = _run(
        Sweep(
            trace=traffic,
            plan=given,
            spec=spec,
            tier=_tier(given, tier),
            moves=moves,
            reserves=tuple(i / (points - 1) for i in range(points)),
            seeds=tuple(range(seeds)),
            drain_s=default_drain_s(given) if drain_s is None else drain_s,
        ),
        processes=jobs,
    )
    command = command_line(
        "frontier",
        {"--trace": trace, "--plan": plan, "--tier": tier, "--move": move, "--points": points}
        | {"--engine": engine, "--seeds": seeds, "--drain-s": drain_s, **limits, "--html": html},
        caching=enable_prefix_caching,
    )
    _deliver(replace(found, command=command), json=json, html=html)


def _move(text: str) -> tuple[str, ...]:
    """The knobs of one `--move`."""
    knobs = tuple(text.split("+"))
    for place, knob in enumerate(knobs):
        if knob not in _KNOBS or knob in knobs[:place]:
            raise FlagError(
                "--move",
                value=text,
                bound=f"one or several of {', '.join(_KNOBS)}, joined by +",
                remedy=did_you_mean(knob, _KNOBS) or f"try {DEFAULT_MOVE}",
            )
    return knobs


def _tier(plan: Plan, name: str | None) -> str:
    names = list(plan.tiers)
    if name is not None and name not in names:
        raise FlagError(
            "--tier",
            value=name,
            bound=f"a tier of plan {plan.name}: {', '.join(names)}",
            remedy=did_you_mean(name, names),
        )
    return names[0] if name is None else name


def _traffic(path: Path | None) -> Trace:
    import numpy as np

    from trimtab.training.traces import read_trace
    from trimtab.training.traces.generate import demo_trace

    if path is None:
        return demo_trace(0)
    # A fixed generator: what a format leaves open must not differ between two calls.
    traffic = read_trace(path, rng=np.random.default_rng(0))
    if not len(traffic):
        raise TraceError(path.name, value="0 requests", bound="at least one request")
    return traffic


def _run(sweep: Sweep, *, processes: int | None) -> ReserveStudy:
    """Run the sweep; a progress bar on standard error if that is a terminal."""
    from trimtab.training.economics.sweep import run_sweep, runs_of

    with forking_bar() as bar:
        task = bar.add_task(f"replaying {len(sweep.trace):,} requests", total=runs_of(sweep))
        return run_sweep(
            sweep, processes=processes, on_done=lambda: bar.update(task, advance=1, refresh=True)
        )


def _deliver(study: ReserveStudy, *, json: Path | None, html: Path | None) -> None:
    """Write the files, print each frontier's table and verdict, and the files' paths last."""
    from rich.console import Console

    from trimtab.engine_bridge.atomic import write_text
    from trimtab.training.report.frontier import moved, render, verdict

    if json is not None:
        write_text(json, study.to_json() + "\n")
    if html is not None:
        write_text(html, render(study))
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=_PIPED_WIDTH)
    hint = (
        "USD/1M: of tokens within targets; forgone: USD an hour, for the goodput missing to the "
        "point with the most; pays: USD an hour, the tier\n"
    )
    for found in study.frontiers:
        console.print(f"{found.tier}: {moved(found.knobs)}", markup=False, style="bold")
        console.print(_table(found))
        console.print(hint, style="dim")
        for sentence in verdict(found):
            console.print(f"- {sentence}", markup=False)
        console.print()
    for name, path in (("json", json), ("report", html)):
        if path is not None:
            # Not through rich: a path must come out unwrapped.
            print(f"{name}: {path}")


def _table(found: Frontier) -> Table:
    from rich import box
    from rich.markup import escape
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD)
    heads = (
        "reserve", f"{escape(found.tier)} %", "95 % interval", "tokens/s", "by value",
        "USD/1M", "forgone", "pays",
    )  # fmt: skip
    for name in heads:
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    for point in found.points:
        table.add_row(*_cells(point))
    return table


def _cells(point: Point) -> Sequence[str]:
    from trimtab.training.report import words
    from trimtab.training.report.frontier import marks_of, reserve

    def percent(share: float) -> str:
        return words.percent(share, 2).removesuffix(" %")

    reached = point.attainment
    return (
        reserve(point.reserve).removesuffix(" %"),
        percent(reached.mean),
        f"{percent(reached.low)} to {percent(reached.high)}",
        words.number(point.goodput.mean),
        words.number(point.weighted_goodput.mean),
        words.number(point.usd_per_1m_good_tokens, 3),
        words.number(point.forgone_usd_per_hour.mean, 3),
        words.number(point.tier_usd_per_hour, 2),
        ", ".join(marks_of(point)),
    )


def _in_range(flag: str, value: float | None, low: float, high: float) -> None:
    if value is not None and not low <= value <= high:
        raise FlagError(flag, value=value, bound=f"from {low:,g} to {high:,g}")

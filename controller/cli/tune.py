"""`trimtab tune`: the static plan that serves recorded traffic best, and what it gains.

It parses flags, prints and writes files; the search is `trimtab.training.tuning`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trimtab.controller.cli.bar import forking_bar
from trimtab.controller.cli.whatif import (
    DEFAULT_ENGINE,
    Blocks,
    BlockSize,
    Caching,
    Engine,
    Jobs,
    MaxSeqs,
    MaxTokens,
)
from trimtab.engine_bridge.errors import FlagError, TraceError

if TYPE_CHECKING:
    from rich.table import Table

    from trimtab.engine_bridge.trace import Trace
    from trimtab.training.tuning.search import Progress
    from trimtab.training.tuning.tune import Task, Tuned

_MOST_TRIALS = 100_000
_MOST_VARIATIONS = 100
_MOST_JOBS = 1024
_PIPED_WIDTH = 100
_INTERRUPTED = 130

Traces = Annotated[
    list[Path], typer.Option("--trace", help="Recorded traffic to tune for; several times.")
]
Plan = Annotated[
    str | None,
    typer.Option("--plan", help="Where to start: a plan file, default or published."),
]
Out = Annotated[Path, typer.Option("--out", help="Plan file to write.")]
Trials = Annotated[int, typer.Option("--trials", help="Plans to try, the given one included.")]
Seed = Annotated[int, typer.Option("--seed", help="Of the search.")]
Variations = Annotated[
    int,
    typer.Option("--variations", help="Of each trace in every trial; the first is as recorded."),
]
Validation = Annotated[
    list[Path] | None,
    typer.Option(
        "--validation",
        help="Traffic to measure the gain on, several times; left out, variations of --trace "
        "that the search has not seen.",
    ),
]
Anyway = Annotated[
    bool,
    typer.Option("--write-best", help="Write the best plan found even if no gain is shown."),
]
Json = Annotated[Path | None, typer.Option("--json", help="Write the result for machines.")]


def register(app: typer.Typer) -> None:
    """Add the command to the command line."""
    app.command("tune")(tune)


def tune(
    trace: Traces,
    out: Out,
    plan: Plan = None,
    engine: Engine = DEFAULT_ENGINE,
    trials: Trials = 100,
    seed: Seed = 0,
    variations: Variations = 2,
    validation: Validation = None,
    write_best: Anyway = False,
    json: Json = None,
    jobs: Jobs = None,
    max_num_seqs: MaxSeqs = None,
    max_num_batched_tokens: MaxTokens = None,
    num_gpu_blocks: Blocks = None,
    block_size: BlockSize = None,
    enable_prefix_caching: Caching = None,
) -> int:
    """Search the best static plan for recorded traffic, and measure what it gains."""
    from trimtab.controller.cli.study import check_outputs
    from trimtab.controller.cli.whatif import check_fit
    from trimtab.engine_bridge.engine_spec import get_engine_spec
    from trimtab.engine_bridge.plan import load_plan
    from trimtab.training.tuning.tune import Task
    from trimtab.training.tuning.tune import tune as run

    _in_range("--trials", trials, 1, _MOST_TRIALS)
    _in_range("--seed", seed, 0, 2**32 - 1)
    _in_range("--variations", variations, 1, _MOST_VARIATIONS)
    _in_range("--jobs", jobs, 1, _MOST_JOBS)
    for flag, limit in (
        ("--max-num-seqs", max_num_seqs),
        ("--max-num-batched-tokens", max_num_batched_tokens),
        ("--num-gpu-blocks", num_gpu_blocks),
        ("--block-size", block_size),
    ):
        _in_range(flag, limit, 1, 2**31 - 1)
    inputs = [*trace, *(validation or []), *([Path(plan)] if plan else [])]
    check_outputs({"--out": out, "--json": json}, inputs=inputs)
    given = load_plan(plan)
    spec = get_engine_spec(engine).with_limits(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        num_gpu_blocks=num_gpu_blocks,
        block_size=block_size,
        enable_prefix_caching=enable_prefix_caching,
    )
    task = Task(
        plan=given,
        traces=_read("--trace", trace),
        validation=_read("--validation", validation or []),
        spec=spec,
        trials=trials,
        seed=seed,
        variations=variations,
    )
    for traffic in (*task.traces.values(), *task.validation.values()):
        check_fit(traffic, [given], spec)
    tuned = _with_progress(lambda tell: run(task, processes=jobs, tell=tell))
    _deliver(task, tuned, plan_name=plan, out=out, json=json, write_best=write_best)
    return _INTERRUPTED if tuned.interrupted else 0


def _read(flag: str, paths: Sequence[Path]) -> dict[str, Trace]:
    import numpy as np

    from trimtab.training.traces import read_trace

    found: dict[str, Trace] = {}
    for path in paths:
        if str(path) in found:
            raise FlagError(
                flag, value=str(path), bound="given once", remedy="leave one of them out"
            )
        # A fixed generator: what a format leaves open must not differ between two calls.
        traffic = read_trace(path, rng=np.random.default_rng(0))
        if not len(traffic):
            raise TraceError(path.name, value="0 requests", bound="at least one request")
        found[str(path)] = traffic
    return found


def _with_progress(run: Callable[[Callable[[Progress], None]], Tuned]) -> Tuned:
    """Run with a progress bar on standard error if that is a terminal."""
    with forking_bar() as bar:
        task = bar.add_task("tuning")

        def tell(progress: Progress) -> None:
            bar.update(
                task,
                completed=progress.done,
                total=progress.total,
                description=progress.doing,
                refresh=True,
            )

        return run(tell)


def _deliver(
    task: Task,
    tuned: Tuned,
    *,
    plan_name: str | None,
    out: Path,
    json: Path | None,
    write_best: bool,
) -> None:
    """Write the plan and the result, print the table and the verdict, and the plan's path last."""
    from trimtab.engine_bridge.atomic import write_text
    from trimtab.training.tuning import summary
    from trimtab.training.tuning.plan_text import plan_text
    from trimtab.training.tuning.tune import GIVEN, TUNED

    write = bool(tuned.changes) and (tuned.shown or tuned.interrupted or write_best)
    text = plan_text(plan_name)
    if write:
        text = summary.tuned_text(task, tuned, text)
    write_text(out, text)
    if json is not None:
        written = TUNED if write else GIVEN
        write_text(json, summary.to_json(task, tuned, written=written, out=out))
    _print(tuned, write)
    print(f"plan: {out}")


def _print(tuned: Tuned, written: bool) -> None:
    from rich.console import Console

    from trimtab.training.tuning.summary import verdict

    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=_PIPED_WIDTH)
    if tuned.changes:
        console.print(_changes_table(tuned))
    if tuned.evaluation is not None:
        console.print(_tiers_table(tuned))
    console.print(verdict(tuned), markup=False, style="bold")
    if tuned.changes and not written:
        console.print(
            "The given plan is written unchanged; --write-best writes the best one found.",
            markup=False,
        )


def _changes_table(tuned: Tuned) -> Table:
    from rich import box
    from rich.markup import escape
    from rich.table import Table

    from trimtab.training.tuning.space import shown

    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("knob", no_wrap=True)
    table.add_column("from", justify="right", no_wrap=True)
    table.add_column("to", justify="right", no_wrap=True)
    for change in tuned.changes:
        table.add_row(escape(".".join(change.place)), shown(change.before), shown(change.after))
    return table


def _tiers_table(tuned: Tuned) -> Table:
    """Attainment under both plans, on traffic that the search has not seen."""
    from rich import box
    from rich.markup import escape
    from rich.table import Table

    from trimtab.training.tuning.tune import GIVEN, TUNED

    evaluation, gain = tuned.evaluation, tuned.gain
    table = Table(box=box.SIMPLE_HEAD)
    for name in ("% within targets", GIVEN, TUNED, "gain", "95 % interval"):
        table.add_column(name, justify="left" if name.startswith("%") else "right", no_wrap=True)
    if evaluation is None or gain is None:
        return table
    levels = {label: evaluation.tier_attainment(label) for label in (GIVEN, TUNED)}
    rows = [("all", evaluation.mean(GIVEN), evaluation.mean(TUNED), gain.attainment)]
    rows += [(t, levels[GIVEN][t], levels[TUNED][t], found) for t, found in gain.tiers.items()]
    for name, before, after, found in rows:
        low, high = (100 * bound for bound in found.ci95)
        table.add_row(
            escape(name),
            f"{100 * before:.2f}",
            f"{100 * after:.2f}",
            f"{100 * found.mean:+.2f}",
            f"{low:+.2f} to {high:+.2f}",
        )
    return table


def _in_range(flag: str, value: float | None, low: float, high: float) -> None:
    if value is not None and not low <= value <= high:
        raise FlagError(flag, value=value, bound=f"from {low:,g} to {high:,g}")

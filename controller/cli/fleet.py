"""`trimtab fleet`: how a trace fares on several engines behind the gateway's routing.

It parses flags and prints; the work is `trimtab.training.fleet`'s.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from trimtab.engine_bridge.errors import FlagError

if TYPE_CHECKING:
    from rich.table import Table

    from trimtab.training.fleet.compare import FleetStudy
    from trimtab.training.fleet.figures import FleetResult

_MOST_SEEDS: Final = 100
_PIPED_WIDTH: Final = 120


def register(app: typer.Typer) -> None:
    """Add the command to the command line."""
    app.command("fleet")(fleet)


def fleet(
    trace: Annotated[Path, typer.Option("--trace", help="Recorded traffic.")],
    fleets: Annotated[
        list[Path], typer.Option("--fleet", help="A fleet's file; several are compared.")
    ],
    plan: Annotated[
        str | None, typer.Option("--plan", help="Plan file or shipped plan. Default: default.")
    ] = None,
    policy: Annotated[
        list[str] | None,
        typer.Option("--policy", help="Policy on each engine; several are compared."),
    ] = None,
    seeds: Annotated[int, typer.Option("--seeds", help="Seeds to run, from 0.")] = 1,
    drain_s: Annotated[
        float | None, typer.Option("--drain-s", help="Longest time after the last arrival.")
    ] = None,
    jobs: Annotated[int | None, typer.Option("--jobs", help="Processes.")] = None,
    json: Annotated[
        Path | None, typer.Option("--json", help="Write the figures to this file.")
    ] = None,
) -> None:
    """Replay recorded traffic on fleets of engines: one more GPU, or better shares?"""
    from trimtab.controller.cli.bar import forking_bar
    from trimtab.controller.cli.study import check_outputs
    from trimtab.engine_bridge.atomic import write_text
    from trimtab.training.fleet.compare import run_fleets
    from trimtab.training.fleet.figures import to_json

    if not 1 <= seeds <= _MOST_SEEDS:
        raise FlagError("--seeds", value=seeds, bound=f"from 1 to {_MOST_SEEDS}")
    if drain_s is not None and not 0.0 <= drain_s <= 1e6:
        raise FlagError("--drain-s", value=drain_s, bound="from 0 to 1,000,000")
    if jobs is not None and not 1 <= jobs <= 1024:
        raise FlagError("--jobs", value=jobs, bound="from 1 to 1,024")
    check_outputs({"--json": json}, inputs=[trace, *fleets])
    study = _study(trace, fleets, plan, policy or ["static"], seeds, drain_s)
    total = len(study.fleets) * len(study.policies) * len(study.seeds)
    with forking_bar() as progress:
        task = progress.add_task(f"replaying {len(study.trace):,} requests", total=total)

        def tell(result: FleetResult) -> None:
            done = f"{result.fleet}, {result.policy}, seed {result.seed}"
            progress.update(task, advance=1, description=done)
            progress.refresh()

        results = run_fleets(study, processes=jobs, on_done=tell)
    _print(study, results)
    if json is not None:
        facts = {
            "plan": study.plan.name,
            "trace": {
                "digest": study.trace.digest(),
                "requests": len(study.trace),
                "duration_s": study.trace.duration_s,
            },
        }
        write_text(json, to_json(results, facts) + "\n")
        print(f"json: {json}")


def _study(
    trace: Path,
    fleets: list[Path],
    plan: str | None,
    policies: list[str],
    seeds: int,
    drain_s: float | None,
) -> FleetStudy:
    from trimtab.agents.registry import make_policy
    from trimtab.controller.cli.whatif import check_fit, read_traffic
    from trimtab.engine_bridge.plan import load_plan
    from trimtab.training.fleet.compare import FleetStudy, specs_of
    from trimtab.training.fleet.settings import load_fleet
    from trimtab.training.whatif.drafting import check_acceptance
    from trimtab.training.whatif.run import default_drain_s

    loaded = load_plan(plan)
    read = [load_fleet(path) for path in fleets]
    names = [one.name for one in read]
    for path, one in zip(fleets, read, strict=True):
        if names.count(one.name) > 1:
            raise FlagError("--fleet", value=one.name, bound="fleets of different names")
        one.check_tiers(loaded, str(path))
    for name in policies:
        make_policy(name).reset(loaded, 0)
    specs = tuple(specs_of(one, str(path)) for path, one in zip(fleets, read, strict=True))
    traffic = read_traffic(trace)
    for engines in specs:
        for spec in engines.values():
            check_fit(traffic, [loaded], spec)
            check_acceptance(traffic, spec)
    return FleetStudy(
        trace=traffic,
        plan=loaded,
        fleets=tuple(read),
        specs=specs,
        policies=tuple(policies),
        seeds=tuple(range(seeds)),
        drain_s=default_drain_s(loaded) if drain_s is None else drain_s,
    )


def _print(study: FleetStudy, results: tuple[FleetResult, ...]) -> None:
    from rich.console import Console

    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=_PIPED_WIDTH)
    console.print(_table(study, results))
    console.print(
        "% of requests within targets, means over seeds (all: weighted by value); ✗ promise missed",
        style="dim",
    )


def _table(study: FleetStudy, results: tuple[FleetResult, ...]) -> Table:
    import numpy as np
    from rich import box
    from rich.markup import escape
    from rich.table import Table

    from trimtab.training.diagnosis.signs import mean
    from trimtab.training.report import words

    tiers = [name for name in study.plan.tiers if results[0].tiers[name].requests]
    table = Table(box=box.SIMPLE_HEAD)
    for name in ("fleet", "policy"):
        table.add_column(name, no_wrap=True)
    for name in ("all", *map(escape, tiers), "lost", "busy", "USD/h", "USD/1M good"):
        table.add_column(name, justify="right", no_wrap=True)
    groups: dict[tuple[str, str], list[FleetResult]] = {}
    for result in results:
        groups.setdefault((result.fleet, result.policy), []).append(result)
    for (fleet_name, policy), runs in groups.items():
        busy = [e.utilization for run in runs for e in run.engines.values()]
        hours = float(np.mean([run.end_s for run in runs])) / 3600.0
        cost = float(np.mean([run.cost_usd for run in runs]))
        cells = [_share(float(np.mean([run.weighted_attainment for run in runs])), np.nan)]
        for name in tiers:
            targets = study.plan.tiers[name].targets
            promised = np.nan if targets.best_effort else targets.attainment
            cells.append(_share(float(np.mean([r.tiers[name].attainment for r in runs])), promised))
        cells += [
            words.number(float(np.mean([sum(t.lost for t in r.tiers.values()) for r in runs]))),
            words.percent(mean(busy), 0),
            words.number(cost / hours if hours else np.nan),
            words.number(mean([run.cost_per_1m_good_tokens for run in runs])),
        ]
        table.add_row(escape(fleet_name), escape(policy), *cells)
    return table


def _share(value: float, target: float) -> str:
    from trimtab.training.report import words

    text = words.percent_against(value, target).removesuffix(" %")
    return f"{text} ✗" if value < target else text

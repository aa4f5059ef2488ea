"""`trimtab diagnose`: what is wrong with a run or an engine, and what to try.

It parses flags and prints; the work is `trimtab.training.diagnosis`'.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from trimtab.engine_bridge.errors import FlagError, InputError

if TYPE_CHECKING:
    from trimtab.engine_bridge.plan import Plan
    from trimtab.training.diagnosis.diagnosis import Diagnosis
    from trimtab.training.diagnosis.sources import Found

_LONGEST_S: Final = 7 * 86_400.0
_LOG_S: Final = 600.0
_WATCH_S: Final = 30.0
_DEFAULT_ENGINE: Final = "h100:llama-3.1-8b-tp1"


def register(app: typer.Typer) -> None:
    """Add the command to the command line."""
    app.command("diagnose")(diagnose)


def diagnose(
    source: Annotated[
        str,
        typer.Argument(
            help="JSON of trimtab whatif, folder of a traffic log, or URL of a metrics page."
        ),
    ],
    plan: Annotated[
        str | None, typer.Option("--plan", help="Plan file or shipped plan. Default: default.")
    ] = None,
    engine: Annotated[
        str | None,
        typer.Option(
            "--engine",
            help=f"Engine, by name or file. Default: the what-if's, else {_DEFAULT_ENGINE}.",
        ),
    ] = None,
    policy: Annotated[
        str | None, typer.Option("--policy", help="Of a what-if: which contender. Default: first.")
    ] = None,
    seed: Annotated[int, typer.Option("--seed", help="Of a what-if: which seed.")] = 0,
    since: Annotated[
        str | None,
        typer.Option(
            "--since", help="Of a traffic log: start, seconds since 1970 or an ISO time in UTC."
        ),
    ] = None,
    seconds: Annotated[
        float | None,
        typer.Option(
            "--seconds",
            help=f"How much of a traffic log ({_LOG_S:g}), or how long to watch ({_WATCH_S:g}).",
        ),
    ] = None,
    json: Annotated[
        Path | None, typer.Option("--json", help="Write the diagnosis to this file.")
    ] = None,
    write_plan: Annotated[
        Path | None,
        typer.Option("--write-plan", help="Write the plan with the proposed changes, to try it."),
    ] = None,
) -> None:
    """Name what is wrong with a run or an engine, with the evidence, and what to try.

    The proposed plan is untried: replay it with trimtab whatif before you act.
    """
    from trimtab.controller.cli.study import check_outputs
    from trimtab.engine_bridge.atomic import write_text
    from trimtab.engine_bridge.plan import load_plan
    from trimtab.training.diagnosis.diagnosis import diagnose as diagnosed

    if seconds is not None and not 1.0 <= seconds <= _LONGEST_S:
        raise FlagError("--seconds", value=seconds, bound=f"from 1 to {_LONGEST_S:,.0f}")
    inputs = [Path(name) for name in (source, plan or "") if Path(name).is_file()]
    check_outputs({"--json": json, "--write-plan": write_plan}, inputs=inputs)
    loaded = load_plan(plan)
    found = _found(source, loaded, engine, policy, seed, since, seconds)
    result = diagnosed(found.signs, found.plan, found.spec, source=found.told)
    for line in result.lines():
        print(line)
    if json is not None:
        write_text(json, result.to_json() + "\n")
        print(f"json: {json}")
    if write_plan is not None:
        _write_plan(result, plan, write_plan)


def _found(
    source: str,
    plan: Plan,
    engine: str | None,
    policy: str | None,
    seed: int,
    since: str | None,
    seconds: float | None,
) -> Found:
    from trimtab.controller.cli.profile import unix_s
    from trimtab.engine_bridge.engine_spec import get_engine_spec
    from trimtab.training.diagnosis.sources import from_log, from_metrics, from_whatif

    path = Path(source)
    if source.startswith(("http://", "https://")):
        from trimtab.engine_bridge.live.scrape import ScrapeSource

        spec = get_engine_spec(engine or _DEFAULT_ENGINE)
        page = ScrapeSource(source, timeout_s=5.0)
        return from_metrics(page, plan, spec, window_s=seconds or _WATCH_S)
    if path.is_dir():
        return from_log(
            path,
            plan,
            get_engine_spec(engine or _DEFAULT_ENGINE),
            since_unix_s=None if since is None else unix_s(since),
            window_s=seconds or _LOG_S,
        )
    if not path.exists():
        raise InputError(
            source,
            bound="a what-if's JSON, a folder of a traffic log, or a http:// URL",
            remedy="make one with trimtab whatif --json",
        )
    return from_whatif(path, plan, policy=policy, seed=seed, engine=engine)


def _write_plan(result: Diagnosis, name: str | None, path: Path) -> None:
    from trimtab.engine_bridge.atomic import write_text
    from trimtab.training.tuning.plan_text import plan_text, rewrite

    wanted = result.remedied_plan()
    if wanted is None:
        print("no change of the plan is proposed: none was written")
        return
    named = wanted.model_copy(update={"name": f"{wanted.name}-remedied"})
    values = {place: str(value).lower() for place, value in result.remedy.changes.items()}
    values["name",] = named.name
    note = f"Plan {result.plan.name} with what trimtab diagnose proposes ({result.primary})."
    write_text(path, rewrite(plan_text(name), values, wanted=named, note=note))
    print(f"plan: {path}")

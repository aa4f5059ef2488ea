"""`trimtab incident`: reported incidents on stock rules and on ours, each held to its bounds."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trimtab.engine_bridge.errors import FlagError, IncidentError, did_you_mean

if TYPE_CHECKING:
    from trimtab.training.incidents.suite import EngineName, SuiteResult

ALL = "all"
REPORT = "incidents.html"
_PIPED_WIDTH = 150

Keys = Annotated[list[str], typer.Argument(help="A, B, C, D, several of them, or all.")]
Engine = Annotated[
    str,
    typer.Option(
        "--engine", help="replay, or emulated: vLLM's own scheduler in virtual time (minutes)."
    ),
]
Json = Annotated[Path | None, typer.Option("--json", help="Write the result for machines.")]
Out = Annotated[
    Path | None,
    typer.Option("--out", help="Folder for the report and for each incident's traffic."),
]
Markdown = Annotated[
    Path | None,
    typer.Option(
        "--markdown",
        help="Write the table as Markdown: into a new file, or into a page between its marks "
        "<!-- incidents --> and <!-- /incidents -->.",
    ),
]
Seed = Annotated[int, typer.Option("--seed", help="Of the traffic.")]


def register(app: typer.Typer) -> None:
    """Add the command to the command line."""
    app.command("incident")(incident)


def incident(
    keys: Keys,
    engine: Engine = "replay",
    json: Json = None,
    out: Out = None,
    markdown: Markdown = None,
    seed: Seed = 0,
) -> None:
    """Show four reported incidents on stock vLLM's rules, and what Trimtab makes of them.

    Exit code 1 if one is not reproduced, or not cured.
    """
    from trimtab.controller.cli.study import check_outputs
    from trimtab.engine_bridge.atomic import write_text
    from trimtab.training.incidents import suite, table

    wanted = _wanted(keys, list(suite.INCIDENTS))
    name = _engine(engine, suite.ENGINES)
    if not 0 <= seed < 2**31:
        raise FlagError("--seed", value=seed, bound=f"from 0 to {2**31 - 1}")
    report = None if out is None else out / REPORT
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
    check_outputs({"--json": json, "--out": report, "--markdown": markdown}, inputs=[])
    page = None if markdown is None else _page(markdown)
    result = _run(wanted, name, seed)
    if json is not None:
        write_text(json, result.to_json() + "\n")
    if markdown is not None:
        made = table.markdown(result)
        write_text(markdown, made if page is None else table.in_page(page, made))
    if out is not None:
        _write_folder(result, out)
    _print(result)
    for word, path in (("json", json), ("markdown", markdown), ("report", report)):
        if path is not None:
            print(f"{word}: {path}")
    if not result.all_well:
        raise IncidentError(_not_well(result))


def _wanted(keys: list[str], known: list[str]) -> list[str]:
    """The letters that are asked for, in the incidents' order."""
    for key in keys:
        if key != ALL and key not in known:
            raise FlagError(
                "incident",
                value=key,
                bound=f"one of {', '.join(known)}, {ALL}",
                remedy=did_you_mean(key, [*known, ALL]),
            )
    return known if ALL in keys else [key for key in known if key in keys]


def _engine(name: str, known: tuple[EngineName, ...]) -> EngineName:
    for engine in known:
        if engine == name:
            return engine
    raise FlagError(
        "--engine",
        value=name,
        bound=f"one of {', '.join(known)}",
        remedy=did_you_mean(name, known),
    )


def _page(path: Path) -> str | None:
    """The page that the table goes into; None for a new file."""
    from trimtab.training.incidents.table import BEGIN, END, has_marks

    if not path.exists():
        return None
    text = path.read_text(encoding="utf-8")
    if not has_marks(text):
        raise FlagError(
            "--markdown",
            value=str(path),
            bound=f"a new file, or a page with {BEGIN.strip()} and {END}, each on its line",
            remedy="give another path, or put the marks where the table belongs",
        )
    return text


def _run(keys: list[str], engine: EngineName, seed: int) -> SuiteResult:
    from trimtab.controller.cli.bar import forking_bar
    from trimtab.training.incidents.incident import Verdict
    from trimtab.training.incidents.suite import run_suite

    with forking_bar() as progress:
        task = progress.add_task(f"incident {keys[0]}", total=len(keys))
        progress.refresh()

        def tell(verdict: Verdict) -> None:
            progress.update(task, advance=1, description=f"incident {verdict.incident.key}")
            progress.refresh()

        return run_suite(keys, engine, seed=seed, on_done=tell)


def _write_folder(result: SuiteResult, folder: Path) -> None:
    """The report, and the traffic of each incident as it came to the stock engine."""
    from trimtab.engine_bridge.atomic import write_text
    from trimtab.training.incidents.incident import BEFORE
    from trimtab.training.incidents.page import render
    from trimtab.training.traces import write_trace

    for verdict in result.verdicts:
        write_trace(verdict.runs[BEFORE].trace, folder / f"{verdict.incident.key}.parquet")
    write_text(folder / REPORT, render(result))


def _print(result: SuiteResult) -> None:
    from rich import box
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    from trimtab.training.incidents import table, words

    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=_PIPED_WIDTH)
    for verdict in result.verdicts:
        incident = verdict.incident
        console.print(f"{incident.key}. {incident.title}", markup=False, style="bold")
        drawn = Table(box=box.SIMPLE_HEAD)
        for number, head in enumerate(table.HEADS):
            drawn.add_column(head, justify="left" if number == 0 else "right")
        for row in table.rows(verdict):
            drawn.add_row(*(escape(text.replace("**", "")) for text in row))
        console.print(drawn)
        console.print(words.sentence(verdict) + "\n", markup=False)


def _not_well(result: SuiteResult) -> str:
    wrong = [
        f"{verdict.incident.key} is {'not cured' if verdict.reproduced else 'not reproduced'}"
        for verdict in result.verdicts
        if not (verdict.reproduced and verdict.cured)
    ]
    return "; ".join(wrong)

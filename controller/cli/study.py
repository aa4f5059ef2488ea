"""What `whatif` and `demo` share: output paths, the progress bar, the table, the files.

It decides nothing about what is compared.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from trimtab.controller.cli.bar import forking_bar
from trimtab.engine_bridge.errors import FlagError

if TYPE_CHECKING:
    from rich.table import Table

    from trimtab.training.whatif.run import Outcome, Study
    from trimtab.training.whatif.schema import WhatIfResult

_PIPED_WIDTH = 120


@dataclass(frozen=True, kw_only=True)
class Outputs:
    """The files that a command was asked to write; None where it was not."""

    json: Path | None = None
    html: Path | None = None
    requests: Path | None = None

    def check(self, *, inputs: Sequence[Path] = ()) -> None:
        """Refuse, before any work is done, what could not be written or would destroy an input.

        Raises:
            FlagError: with the flag, the path and what to do.
        """
        flags = {"--json": self.json, "--html": self.html, "--requests": self.requests}
        check_outputs(flags, inputs=inputs)


def check_outputs(outputs: Mapping[str, Path | None], *, inputs: Sequence[Path]) -> None:
    """Refuse what could not be written or would destroy an input.

    Args:
        outputs: path by flag; None where the flag was not given.
        inputs: what the command reads.

    Raises:
        FlagError: with the flag, the path and what to do.
    """
    taken = {path.resolve(): "an input of this command" for path in inputs}
    for flag, path in outputs.items():
        if path is None:
            continue
        _check_writable(flag, path)
        if path.resolve() in taken:
            raise FlagError(
                flag,
                value=str(path),
                bound=f"another file than {taken[path.resolve()]}",
                remedy="give another path",
            )
        taken[path.resolve()] = f"that of {flag}"


def run_with_progress(study: Study, *, processes: int | None) -> Outcome:
    """Run the study; a progress bar on standard error if that is a terminal."""
    from trimtab.training.whatif.run import Run, run_study

    total = len(study.contenders) * len(study.seeds)
    with forking_bar() as progress:
        task = progress.add_task(f"replaying {len(study.trace):,} requests", total=total)
        progress.refresh()

        def tell(run: Run) -> None:
            progress.update(task, advance=1, description=f"{run.label}, seed {run.seed}")
            progress.refresh()

        return run_study(study, processes=processes, on_done=tell)


def deliver(outcome: Outcome, *, outputs: Outputs, command: str) -> None:
    """Write the files, print verdict and table, and the report's path last."""
    from trimtab.engine_bridge.atomic import write_text
    from trimtab.training.report.page import render
    from trimtab.training.whatif.requests_table import write_requests

    outcome = replace(outcome, result=replace(outcome.result, command=command))
    if outputs.requests is not None:
        write_requests(outcome, outputs.requests)
    if outputs.json is not None:
        write_text(outputs.json, outcome.result.to_json() + "\n")
    if outputs.html is not None:
        write_text(outputs.html, render(outcome))
    _print(outcome.result)
    for name, path in (
        ("requests", outputs.requests),
        ("json", outputs.json),
        ("report", outputs.html),
    ):
        if path is not None:
            # Not through rich: a path must come out unwrapped.
            print(f"{name}: {path}")


def _print(result: WhatIfResult) -> None:
    from rich.console import Console

    from trimtab.training.report.verdict import verdict

    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=_PIPED_WIDTH)
    console.print(_table(result))
    console.print("% within targets (all: weighted by value); ✗ promise missed\n", style="dim")
    found = verdict(result)
    console.print(found.headline, markup=False, style="bold")
    for sentence in (*found.others, *found.tiers, *found.costs, *found.guards):
        console.print(f"- {sentence}", markup=False)


def _table(result: WhatIfResult) -> Table:
    """Shares of requests within their targets; narrow enough for 80 columns."""
    from rich import box
    from rich.markup import escape
    from rich.table import Table

    from trimtab.training.report import words

    def share(value: float, target: float = float("nan")) -> str:
        text = words.percent_against(value, target).removesuffix(" %")
        return f"{text} ✗" if value < target else text

    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("contender", no_wrap=True)
    tiers = [t for t in result.tiers if result.results[0].tiers[t.name].requests]
    for name in ("all", *(escape(tier.name) for tier in tiers), "tokens/s", "busy"):
        table.add_column(name, justify="right", no_wrap=True)
    for policy in result.policies:
        table.add_row(
            escape(policy),
            share(words.weighted(result, policy)),
            *(share(words.attained(result, policy, t.name), t.target) for t in tiers),
            words.number(words.over_seeds(result, policy, lambda r: r.engine.tokens_per_s)),
            share(words.over_seeds(result, policy, lambda r: r.engine.utilization)),
        )
    return table


def _check_writable(flag: str, path: Path) -> None:
    folder = path.parent
    if not folder.is_dir():
        raise FlagError(
            flag,
            value=str(path),
            bound="in a directory that exists",
            remedy=f"make {folder} first",
        )
    if path.is_dir():
        raise FlagError(flag, value=str(path), bound="a file", remedy="it is a directory")
    if not os.access(folder, os.W_OK):
        raise FlagError(
            flag, value=str(path), bound="writable", remedy=f"you may not write in {folder}"
        )

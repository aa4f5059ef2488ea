"""`trimtab calibrate`: checks an engine's step times against a table, or fits them to it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trimtab.engine_bridge.errors import FlagError

if TYPE_CHECKING:
    from trimtab.training.calibration.table import StepTable


def register(app: typer.Typer) -> None:
    """Add the command to the root."""
    app.command("calibrate")(calibrate)


def calibrate(
    table: Annotated[Path, typer.Option(help="CSV of step times, as docs/step-times.md says.")],
    engine: Annotated[
        str, typer.Option("--engine", "--base", help="Engine to check, or to start the fit from.")
    ],
    check: Annotated[bool, typer.Option("--check", help="Report the engine's error.")] = False,
    out: Annotated[
        Path | None, typer.Option(help="Fit the table and write this engine file (YAML).")
    ] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write the errors to this file.")
    ] = None,
    source: Annotated[
        str, typer.Option(help="Take only rows whose column source holds this text.")
    ] = "",
    name: Annotated[str, typer.Option(help="Name of the fitted engine; default the base's.")] = "",
    held_out: Annotated[
        float, typer.Option(help="Fraction of the rows that the fit must not see.")
    ] = 0.25,
    seed: Annotated[int, typer.Option(help="Seed that draws those rows.")] = 0,
) -> None:
    """Check the step-time model of an engine against measured steps, or fit it to them.

    With --check: relative errors of the engine's step times, per kind of step. With --out: fits
    the coefficients to the table and writes an engine file; errors are those of held-out rows.
    """
    from trimtab.engine_bridge.engine_spec import get_engine_spec
    from trimtab.training.calibration.fit import error_report
    from trimtab.training.calibration.table import read_step_table

    if check == (out is not None):
        raise FlagError(
            "calibrate",
            value="--check and --out" if check else "neither --check nor --out",
            bound="one of the two",
            remedy="--check measures the engine's error, --out fits a new one",
        )
    if not 0.0 <= held_out < 1.0:
        raise FlagError("--held-out", value=held_out, bound="from 0 to below 1")
    if seed < 0:
        raise FlagError("--seed", value=seed, bound="at least 0")
    spec = get_engine_spec(engine)
    steps = read_step_table(table, model=spec.model, tp=spec.tp, source=source)
    typer.echo(_scope(steps, spec.model, spec.tp))
    if out is None:
        report = error_report(spec.coef, steps)
        _print_report(f"{spec.name}: relative error of the step time", report)
    else:
        report = _fit(engine, steps, table, out, name=name, held_out=held_out, seed=seed)
    if json_file is not None:
        json_file.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


def _fit(
    engine: str,
    steps: StepTable,
    table: Path,
    out: Path,
    *,
    name: str,
    held_out: float,
    seed: int,
) -> dict[str, Any]:
    import numpy as np

    from trimtab.engine_bridge.engine_file import write_engine_file
    from trimtab.engine_bridge.engine_spec import find_engine_file
    from trimtab.training.calibration.fit import fit_and_test, fitted_file

    base = find_engine_file(engine)
    coef = np.array(list(base.coefficients.values()))
    rng = np.random.default_rng(seed)
    fit = fit_and_test(steps, coef, held_out_fraction=held_out, rng=rng)
    _print_report("fitted rows: relative error of the step time", fit.fitted)
    if fit.held_out["rows"]:
        _print_report("held-out rows", fit.held_out)
    sources = steps.sources or (table.name,)
    write_engine_file(fitted_file(base, fit, name=name, sources=sources), out)
    typer.echo(f"wrote {out}")
    return fit.held_out if fit.held_out["rows"] else fit.fitted


def _scope(steps: StepTable, model: str, tp: int) -> str:
    left_out = {
        "of other engines": steps.other_engine,
        "of other sources": steps.other_source,
        "without attention": steps.without_attention,
    }
    skipped = ", ".join(f"{count} {why}" for why, count in left_out.items() if count)
    rows = f"{len(steps)} rows of {model} tp {tp}"
    return f"{rows}; skipped {skipped}" if skipped else rows


def _print_report(title: str, report: dict[str, Any]) -> None:
    typer.echo(title)
    typer.echo(f"  {'steps':<8} {'rows':>6} {'median':>8} {'P95':>8} {'largest':>8}")
    for kind, errors in ({"all": report} | report["by_kind"]).items():
        shown = ("-" if errors[q] is None else f"{errors[q]:.2%}" for q in ("median", "p95", "max"))
        cells = "".join(f" {cell:>8}" for cell in shown)
        typer.echo(f"  {kind:<8} {errors['rows']:>6}{cells}")

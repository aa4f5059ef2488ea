"""`trimtab calibrate`: fits an engine to measurements, or checks its step times against a table."""

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
    table: Annotated[
        Path | None, typer.Option(help="CSV of step times, as docs/step-times.md says.")
    ] = None,
    engine: Annotated[
        str, typer.Option("--engine", "--base", help="Engine to check, or to start the fit from.")
    ] = "",
    check: Annotated[bool, typer.Option("--check", help="Report the engine's error.")] = False,
    out: Annotated[
        Path | None, typer.Option(help="Fit the measurements and write this engine file (YAML).")
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
    seed: Annotated[int, typer.Option(help="Seed of all random choices.")] = 0,
    kernels: Annotated[
        Path | None, typer.Option(help="Folder of kernel tables: a layer profile, or GEMM and MHA.")
    ] = None,
    steps: Annotated[
        list[Path] | None,
        typer.Option(help="Step log, or a folder of Parquet ones; may be repeated."),
    ] = None,
    requests: Annotated[
        Path | None, typer.Option(help="Requests served one at a time: a folder, or a client CSV.")
    ] = None,
    model: Annotated[str, typer.Option(help="Model, for instance Llama-3.1-8B.")] = "",
    model_config: Annotated[
        Path | None, typer.Option(help="config.json of a model that is not known.")
    ] = None,
    card: Annotated[str, typer.Option(help="GPU, for instance H100.")] = "",
    tp: Annotated[int, typer.Option(help="Tensor-parallel size.")] = 1,
    precision: Annotated[str, typer.Option(help="Of the weights: bf16, fp8 or int4.")] = "bf16",
    log: Annotated[Path | None, typer.Option(help="vLLM's log: it names the KV blocks.")] = None,
    kv_blocks: Annotated[int, typer.Option(help="KV blocks; default the log's or estimated.")] = 0,
    max_num_seqs: Annotated[int, typer.Option(help="As vLLM was started with.")] = 256,
    max_num_batched_tokens: Annotated[int, typer.Option(help="As vLLM was started with.")] = 8192,
    context: Annotated[
        float, typer.Option(help="Typical context of a decoding request, tokens.")
    ] = 1024.0,
) -> None:
    """Fit an engine to measurements, or check the step-time model of one against a table.

    --table with --check: relative errors of the engine's step times, per kind of step. --table with
    --out: fits the coefficients to the table. --kernels, --steps or --requests with --out, --model
    and --card: fits an engine of any card and model, with its KV capacity.
    """
    measured = [flag for flag in (kernels, requests, *(steps or ())) if flag is not None]
    if measured or table is None:
        if table is not None or check or not measured or out is None:
            raise FlagError(
                "calibrate",
                value="no measurements" if not measured else "--table, --check or no --out",
                bound="--table, or --kernels, --steps or --requests with --out",
                remedy="docs/step-times.md has examples",
            )
        from trimtab.training.calibration.assembled import Sources, assembled_engine

        sources = Sources(
            kernels=kernels,
            steps=tuple(steps or ()),
            requests=requests,
            model=model,
            model_config=model_config,
            card=card,
            tp=tp,
            precision=precision,
            log=log,
            num_gpu_blocks=kv_blocks,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            context_tokens=context,
            base=engine,
            seed=seed,
        )
        from trimtab.engine_bridge.engine_file import write_engine_file

        file = assembled_engine(sources, name=name)
        write_engine_file(file, out)
        for entry in file.fidelity.get("sources", ()):
            typer.echo(f"fitted to {entry}")
        typer.echo(f"{file.name}: {file.blocks()} KV blocks; wrote {out}")
        if json_file is not None:
            _write_json(json_file, file.fidelity)
        return
    _calibrate_table(
        table, engine, check, out, json_file, source=source, name=name, held_out=held_out, seed=seed
    )


def _calibrate_table(
    table: Path,
    engine: str,
    check: bool,
    out: Path | None,
    json_file: Path | None,
    *,
    source: str,
    name: str,
    held_out: float,
    seed: int,
) -> None:
    from trimtab.engine_bridge.engine_spec import get_engine_spec
    from trimtab.training.calibration.fit import error_report
    from trimtab.training.calibration.table import read_step_table

    if not engine:
        raise FlagError("--engine", value="", bound="an engine's name or file")
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
        _write_json(json_file, report)


def _write_json(path: Path, report: dict[str, Any]) -> None:
    path.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


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

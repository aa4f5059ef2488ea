"""`trimtab promote`: a registered policy becomes champion if it passes the gate.

The gate itself is in `trimtab.training.learning.promotion`.
"""

from __future__ import annotations

import json as json_text
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trimtab.controller.cli.study import check_outputs
from trimtab.controller.cli.whatif import DEFAULT_ENGINE
from trimtab.engine_bridge.errors import FlagError, PromotionError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from trimtab.agents.bundle import Bundle
    from trimtab.training.learning.inputs import NamedTrace
    from trimtab.training.learning.model_registry import ModelRegistry, Version
    from trimtab.training.learning.promotion import Measured

_MOST_SEEDS = 1000
_LARGEST_MARGIN_PP = 100.0

Model = Annotated[str, typer.Option("--model", help="Name of the registered model.")]
Number = Annotated[str | None, typer.Option("--version", help="Version; left out, the newest.")]
Alias = Annotated[str, typer.Option("--alias", help="Alias to move.")]
Traces = Annotated[
    list[Path],
    typer.Option("--trace", help="Traffic that it was not trained on; several times for several."),
]
PlanFlag = Annotated[str | None, typer.Option("--plan", help="Plan file, or default or published.")]
Engine = Annotated[str, typer.Option("--engine", help="Engine model or engine file.")]
Seeds = Annotated[
    int, typer.Option("--seeds", help="How many variations of each trace; the first as recorded.")
]
AllowEqual = Annotated[
    float | None,
    typer.Option(
        "--allow-equal",
        help="Let pass what is at most so many percentage points worse than static, instead of "
        "asking for a gain.",
    ),
]
Json = Annotated[Path | None, typer.Option("--json", help="Write the gate's figures.")]
Jobs = Annotated[int | None, typer.Option("--jobs", help="Processes at once; left out, one a CPU.")]


def register(app: typer.Typer) -> None:
    """Add the command to the command line."""
    app.command("promote")(promote)


def promote(
    model: Model,
    trace: Traces,
    version: Number = None,
    alias: Alias = "champion",
    plan: PlanFlag = None,
    engine: Engine = DEFAULT_ENGINE,
    seeds: Seeds = 3,
    allow_equal: AllowEqual = None,
    json: Json = None,
    jobs: Jobs = None,
) -> None:
    """Move an alias to a version that is better than the static plan on traffic it never saw.

    Exit code 1 and the line that failed, if it is not.
    """
    from trimtab.controller.cli.train import need_training_extra, read_traces
    from trimtab.engine_bridge.engine_spec import get_engine_spec
    from trimtab.engine_bridge.plan import load_plan

    if not 1 <= seeds <= _MOST_SEEDS:
        raise FlagError("--seeds", value=seeds, bound=f"from 1 to {_MOST_SEEDS:,}")
    if allow_equal is not None and not 0 <= allow_equal <= _LARGEST_MARGIN_PP:
        raise FlagError(
            "--allow-equal", value=allow_equal, bound=f"from 0 to {_LARGEST_MARGIN_PP:g}"
        )
    check_outputs({"--json": json}, inputs=trace)
    need_training_extra()
    from trimtab.agents.bundle import read_bundle
    from trimtab.training.learning.model_registry import ModelRegistry
    from trimtab.training.learning.tracking_place import shown, tracking_uri
    from trimtab.training.learning.validation import Validator

    loaded, spec = load_plan(plan), get_engine_spec(engine)
    uri = tracking_uri(Path.cwd())
    print(f"tracking: {shown(uri)}", flush=True)
    registry = ModelRegistry(uri)
    found = registry.find(model, version=version)
    folder = registry.fetch(found)
    traces = read_traces(trace, loaded, spec)
    _check_held_out(traces, read_bundle(folder), found)
    validator = Validator(
        {f"{number}: {named.name}": named.trace for number, named in enumerate(traces)},
        plan=loaded,
        spec=spec,
        seeds=tuple(range(seeds)),
        processes=jobs,
    )
    validation = validator.validate(folder)
    if json is not None:
        json.write_text(json_text.dumps(validation.content(), indent=2) + "\n", encoding="utf-8")
    pass_gate(
        registry,
        found,
        alias,
        validation.measured(),
        margin=None if allow_equal is None else allow_equal / 100,
    )


def pass_gate(
    registry: ModelRegistry,
    version: Version,
    alias: str,
    measured: Measured,
    *,
    margin: float | None = None,
) -> None:
    """Print the gate's lines and move the alias, if all of them hold.

    Raises:
        PromotionError: a line failed; names it.
    """
    from trimtab.training.learning.promotion import judge

    report = judge(measured, margin=margin)
    low, high = measured.gain_ci95
    print(f"gain over static: {100 * measured.gain:+.2f} pp [{100 * low:+.2f}, {100 * high:+.2f}]")
    for line in report.lines:
        print(f"  {'passed' if line.passed else 'FAILED'}  {line}")
    if not report.passed:
        failed = "; ".join(str(line) for line in report.failed)
        raise PromotionError(f"{version.uri} is not promoted: {failed}")
    before = registry.holder(version.name, alias)
    registry.move_alias(version, alias, tags={"gate": "; ".join(map(str, report.lines))})
    print(f"promoted: models:/{version.name}@{alias} is version {version.number}", end="")
    print(f" (was {before})" if before else "")


def _check_held_out(traces: Sequence[NamedTrace], bundle: Bundle, version: Version) -> None:
    for named in traces:
        if named.digest in bundle.trace_digests:
            raise FlagError(
                "--trace",
                value=named.source,
                bound=f"traffic that {version.uri} was not trained on",
                remedy="give a later window or another source",
            )

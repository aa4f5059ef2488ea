"""`trimtab demo`: the main job on embedded defaults, with nothing to prepare."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from trimtab.engine_bridge.errors import FlagError


def register(app: typer.Typer) -> None:
    """Add the command to the command line."""
    app.command("demo")(demo)


def demo(
    html: Annotated[Path, typer.Option(help="Where the report goes.")] = Path("trimtab-demo.html"),
    json: Annotated[Path | None, typer.Option(help="Write the result for machines.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of the built-in traffic.")] = 0,
) -> None:
    """Compare the shipped plan and policies with stock vLLM on a built-in hour."""
    from trimtab.agents.learned import LearnedPolicy
    from trimtab.controller.cli.study import Outputs, deliver, run_with_progress
    from trimtab.controller.cli.whatif import DEFAULT_POLICIES, contenders_of
    from trimtab.engine_bridge.engine_spec import get_engine_spec
    from trimtab.training.traces.generate import DEFAULT_ENGINE, demo_trace
    from trimtab.training.whatif.run import Study, default_drain_s

    if not 0 <= seed < 2**31:
        raise FlagError("--seed", value=seed, bound=f"from 0 to {2**31 - 1}")
    outputs = Outputs(json=json, html=html)
    outputs.check()
    contenders = contenders_of(policies=(*DEFAULT_POLICIES, LearnedPolicy.name), plans=())
    plan = contenders[0].plan
    outcome = run_with_progress(
        Study(
            trace=demo_trace(seed),
            plan=plan,
            contenders=contenders,
            spec=get_engine_spec(DEFAULT_ENGINE),
            drain_s=default_drain_s(plan),
        ),
        processes=None,
    )
    command = f"trimtab demo --seed {seed}" if seed else "trimtab demo"
    deliver(outcome, outputs=outputs, command=command)

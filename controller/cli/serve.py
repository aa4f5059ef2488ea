"""`trimtab serve`: becomes `vllm serve` with the fair scheduler, identity and metrics in place.

What the command line is made of, `trimtab.controller.launch` decides.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

if TYPE_CHECKING:
    from trimtab.controller.launch import Launch

_METRICS_DIR: Final = "PROMETHEUS_MULTIPROC_DIR"


def register(app: typer.Typer) -> None:
    """Add the command to the root."""
    app.command(
        "serve", context_settings={"allow_extra_args": True, "ignore_unknown_options": True}
    )(serve)


def serve(
    context: typer.Context,
    emulate: Annotated[
        str | None,
        typer.Option(help="Serve this engine without a GPU, for instance h100:llama-3.1-70b-tp8."),
    ] = None,
    stock: Annotated[
        str | None,
        typer.Option(help="Run vLLM's own scheduler, fcfs or priority, instead of the fair one."),
    ] = None,
    plan: Annotated[
        str | None, typer.Option(help="Plan file, or a shipped plan; default the shipped one.")
    ] = None,
    engine: Annotated[
        str | None,
        typer.Option(help="Engine whose step times count service: a name, or an engine file."),
    ] = None,
    keys: Annotated[
        Path | None, typer.Option(help="Keys file (YAML): tenant to hashes of its API keys, tier.")
    ] = None,
    trust_labels: Annotated[
        bool,
        typer.Option(
            "--trust-labels", help="Believe X-Trimtab-Tenant and X-Trimtab-Tier (gateway in front)."
        ),
    ] = False,
    admission: Annotated[
        Path | None, typer.Option(help="Admission file (YAML): quotas and limits of tenants.")
    ] = None,
    control_socket: Annotated[
        Path | None, typer.Option(help="Path of the control socket (unix).")
    ] = None,
    control_tcp: Annotated[
        str | None,
        typer.Option(help="host:port of the control socket; needs TRIMTAB_CONTROL_TOKEN."),
    ] = None,
    step_log: Annotated[Path | None, typer.Option(help="Folder for the log of steps.")] = None,
    traffic_log: Annotated[
        Path | None, typer.Option(help="Folder for the log of requests.")
    ] = None,
    time_scale: Annotated[
        float | None,
        typer.Option(help="Length of an emulated step over the real one; 0 takes no time."),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the command, start nothing.")
    ] = False,
) -> None:
    """Serve MODEL, or an emulated engine, with vLLM under the fair scheduler.

    Usage: trimtab serve MODEL [vLLM flags], or trimtab serve --emulate ENGINE [vLLM flags].
    MODEL comes before vLLM's own flags; those are handed to `vllm serve` as they are.
    """
    from trimtab.controller.launch import Request, plan_launch

    request = Request(
        words=tuple(context.args),
        emulate=emulate,
        stock=stock,
        plan=plan,
        engine=engine,
        keys=keys,
        trust_labels=trust_labels,
        admission=admission,
        control_socket=control_socket,
        control_tcp=control_tcp,
        step_log=step_log,
        traffic_log=traffic_log,
        time_scale=time_scale,
    )
    launch = plan_launch(request, environment=os.environ)
    if engine is None and emulate is None and stock is None:
        from trimtab.engine_bridge.vllm.settings import DEFAULT_ENGINE

        note = f"trimtab: no --engine: service is counted in the step times of {DEFAULT_ENGINE}"
        typer.echo(note, err=True)
    if dry_run:
        typer.echo(launch.shell())
        return
    _become(launch)


def _become(launch: Launch) -> None:
    """Replace this process by the command."""
    environment = {k: v for k, v in os.environ.items() if k not in launch.removed}
    environment |= launch.environment
    if _METRICS_DIR not in environment:
        # Metrics of the engine's process reach the API server through files in a fresh folder.
        environment[_METRICS_DIR] = tempfile.mkdtemp(prefix="trimtab-metrics-")
    sys.stdout.flush()
    os.execvpe(launch.command[0], list(launch.command), environment)

"""`trimtab train`: learn a policy from recorded traffic, from start to registered champion."""

from __future__ import annotations

import shlex
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trimtab.controller.cli.whatif import DEFAULT_ENGINE, check_fit
from trimtab.engine_bridge.errors import FlagError, ModelError, TraceError

if TYPE_CHECKING:
    from types import FrameType

    from trimtab.engine_bridge.engine_spec import EngineSpec
    from trimtab.engine_bridge.plan import Plan
    from trimtab.training.learning.inputs import Inputs, NamedTrace
    from trimtab.training.learning.run import Trained

DEFAULT_STEPS = 200_000
_MOST_STEPS, _MOST_ENVS, _LARGEST_SEED = 10**9, 1024, 2**31 - 1

Traces = Annotated[
    list[Path], typer.Option("--trace", help="Traffic to learn from; several times for several.")
]
PlanFlag = Annotated[str | None, typer.Option("--plan", help="Plan file, or default or published.")]
Steps = Annotated[int, typer.Option("--steps", help="Control intervals to learn from.")]
Seed = Annotated[int, typer.Option("--seed", help="Of everything that is drawn.")]
Out = Annotated[Path, typer.Option("--out", help="Folder of the run: policy, log, checkpoints.")]
Engine = Annotated[str, typer.Option("--engine", help="Engine model or engine file.")]
Algorithm = Annotated[
    str, typer.Option("--algorithm", help="PPO, or A2C, SAC, TD3, DDPG of Stable-Baselines3.")
]
ValidationTraces = Annotated[
    list[Path] | None,
    typer.Option(
        "--validation",
        help="Traffic to validate on; left out, the last fifth of every trace is held back for it.",
    ),
]
Envs = Annotated[int, typer.Option("--envs", help="Engines that are replayed together.")]
WindowLength = Annotated[float, typer.Option("--window-s", help="Length of an episode, seconds.")]
Resume = Annotated[
    bool, typer.Option("--resume", help="Go on with the run in --out, if there is one.")
]
Experiment = Annotated[
    str, typer.Option("--experiment", help="MLflow's name for the group of runs.")
]
Register = Annotated[
    str | None, typer.Option("--register", help="Register the policy as a version of this model.")
]
Promote = Annotated[
    bool,
    typer.Option(
        "--promote",
        help="Give the registered version the alias champion, if it passes the gate on the "
        "validation traffic.",
    ),
]


def register(app: typer.Typer) -> None:
    """Add the command to the command line."""
    app.command("train")(train)


def train(
    trace: Traces,
    out: Out,
    plan: PlanFlag = None,
    steps: Steps = DEFAULT_STEPS,
    seed: Seed = 0,
    engine: Engine = DEFAULT_ENGINE,
    algorithm: Algorithm = "PPO",
    validation: ValidationTraces = None,
    envs: Envs = 8,
    window_s: WindowLength = 600.0,
    resume: Resume = False,
    experiment: Experiment = "trimtab",
    register: Register = None,
    promote: Promote = False,
) -> int:
    """Learn a policy from traces: leaves policy.json and policy.npz in --out, tracked by MLflow.

    Ctrl-C stops it with the best policy so far; --resume goes on.
    """
    from rich.console import Console

    from trimtab.engine_bridge.engine_spec import get_engine_spec
    from trimtab.engine_bridge.plan import load_plan

    _in_range("--steps", steps, 1, _MOST_STEPS)
    _in_range("--seed", seed, 0, _LARGEST_SEED)
    _in_range("--envs", envs, 1, _MOST_ENVS)
    _in_range("--window-s", window_s, 10.0, 1e6)
    if promote and register is None:
        raise FlagError("--promote", bound="given with --register NAME")
    _check_folder(out)
    need_training_extra()
    from trimtab.training.learning.algorithms import algorithm_name
    from trimtab.training.learning.inputs import Inputs
    from trimtab.training.learning.run import Surroundings
    from trimtab.training.learning.run import train as run
    from trimtab.training.learning.settings import TrainSettings
    from trimtab.training.learning.tracking_place import shown, tracking_uri

    settings = TrainSettings(
        steps=steps, seed=seed, algorithm=algorithm_name(algorithm), envs=envs, window_s=window_s
    )
    uri = tracking_uri(Path.cwd())
    loaded, spec = load_plan(plan), get_engine_spec(engine)
    inputs = Inputs(
        traces=read_traces(trace, loaded, spec),
        validation=read_traces(validation or [], loaded, spec),
        plan=loaded,
        spec=spec,
    )
    print(f"tracking: {shown(uri)}", flush=True)
    with _stop_on_signals() as stopping:
        trained = run(
            inputs,
            settings,
            Surroundings(
                folder=out,
                tracking_uri=uri,
                experiment=experiment,
                command=_command(sys.argv),
                resume=resume,
                stopping=stopping,
                console=Console(stderr=True),
                say=_say,
            ),
        )
    _print(trained)
    if trained.interrupted:
        return 130
    if register is not None:
        _register(trained, inputs, register, uri, promote=promote)
    return 0


def read_traces(paths: Sequence[Path], plan: Plan, spec: EngineSpec) -> tuple[NamedTrace, ...]:
    """The traces of the files, each fit for the plan and the engine.

    Raises:
        TraceError: a file is no trace, or has no request.
        PlanError: a trace has a tier that the plan lacks.
        FlagError: prefix blocks that are no whole number of KV blocks.
    """
    import numpy as np

    from trimtab.training.learning.inputs import NamedTrace
    from trimtab.training.traces import read_trace

    found = []
    for path in paths:
        # A fixed generator: what a format leaves open must not differ between two calls.
        trace = read_trace(path, rng=np.random.default_rng(0))
        if not len(trace):
            raise TraceError(path.name, value="0 requests", bound="at least one request")
        check_fit(trace, [plan], spec)
        found.append(NamedTrace(str(path.resolve()), trace))
    return tuple(found)


def _register(trained: Trained, inputs: Inputs, name: str, uri: str, *, promote: bool) -> None:
    from trimtab.controller.cli.promote import pass_gate
    from trimtab.training.learning.model_registry import CHAMPION, ModelRegistry
    from trimtab.training.learning.run import version_tags

    if trained.run_id is None:
        raise ModelError(
            "--register",
            value=name,
            bound="recorded by MLflow first",
            remedy="the bundle is written; repeat the command with --resume when it is reachable",
        )
    registry = ModelRegistry(uri)
    version = registry.register(name, run_id=trained.run_id, tags=version_tags(trained, inputs))
    print(f"registered: {version.uri}")
    if promote and trained.validation is not None:
        pass_gate(registry, version, CHAMPION, trained.validation.measured())


def _print(trained: Trained) -> None:
    if trained.interrupted:
        print(f"interrupted at step {trained.step:,}; --resume goes on")
    validation = trained.validation
    if validation is not None:
        low, high = validation.comparison.attainment.ci95
        print(
            f"best policy: of step {trained.best_step:,}, weighted attainment over static "
            f"{100 * validation.gain:+.2f} pp [{100 * low:+.2f}, {100 * high:+.2f}] on the "
            "validation traffic"
        )
    print(f"bundle: {trained.folder / 'policy.json'} ({trained.digest})")


@contextmanager
def _stop_on_signals() -> Iterator[Callable[[], bool]]:
    """Whether Ctrl-C or a polite kill came. The second one ends the process as usual."""
    asked = False
    before: dict[int, object] = {}

    def ask(number: int, frame: FrameType | None) -> None:
        nonlocal asked
        asked = True
        _restore(before)
        _say("stopping; once more to stop at once")

    for number in (signal.SIGINT, signal.SIGTERM):
        before[number] = signal.signal(number, ask)
    try:
        yield lambda: asked
    finally:
        _restore(before)


def _restore(before: Mapping[int, object]) -> None:
    for number, handler in before.items():
        signal.signal(number, handler)  # type: ignore[arg-type]


def _say(line: str) -> None:
    # The terminal may be gone; that must not cost the run.
    with suppress(OSError):
        typer.echo(f"trimtab: {line}", err=True)


def _check_folder(out: Path) -> None:
    if out.exists() and not out.is_dir():
        raise FlagError("--out", value=str(out), bound="a folder", remedy="give another path")


def need_training_extra() -> None:
    """Refuse, with the remedy, where the learning stack is not installed.

    Raises:
        FlagError: names the first package that is missing.
    """
    from importlib.util import find_spec

    for module in ("torch", "stable_baselines3", "gymnasium", "mlflow"):
        if find_spec(module) is None:
            raise FlagError(
                "train", value=module, bound="installed",
                remedy="install the extra: pip install 'trimtab[train]'",
            )  # fmt: skip


def _command(arguments: Sequence[str]) -> str:
    return shlex.join(["trimtab", *arguments[1:]])


def _in_range(flag: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:
        raise FlagError(flag, value=value, bound=f"from {low:,g} to {high:,g}")

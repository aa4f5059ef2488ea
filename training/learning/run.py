"""One training run from inputs to a bundle: learn, validate, keep the best, record everything.

Equal inputs and settings give an equal bundle. It parses no flags, registers no model and prints
nothing but through what it is given.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from trimtab.agents.bundle import read_bundle
from trimtab.engine_bridge.atomic import replacing, write_text
from trimtab.training.learning.export import write_policy
from trimtab.training.learning.inputs import INPUTS_FOLDER, Inputs, versions
from trimtab.training.learning.model_registry import DIGEST_TAG
from trimtab.training.learning.progress_bar import ProgressBar
from trimtab.training.learning.run_folder import Progress, RunFolder
from trimtab.training.learning.run_log import RunLog
from trimtab.training.learning.settings import TrainSettings
from trimtab.training.learning.tracking import Tracking
from trimtab.training.learning.validation import Validation, Validator

if TYPE_CHECKING:
    from stable_baselines3.common.base_class import BaseAlgorithm

    from trimtab.training.learning.watched_env import WatchedEnv

EVALUATION_NAME = "evaluation.json"
POLICY_FILES = ("policy.json", "policy.npz")


@dataclass(frozen=True, kw_only=True)
class Trained:
    """What a run left behind."""

    folder: Path
    digest: str
    """Of the bundle in `folder`."""
    step: int
    """How far it came."""
    best_step: int
    """Step of the policy in the bundle."""
    validation: Validation | None
    """That policy against static; None after an interruption before the first validation."""
    interrupted: bool
    run_id: str | None
    """MLflow's name of the run; None if its record could not be copied."""


@dataclass(frozen=True, kw_only=True)
class Surroundings:
    """Where a run happens: its folder, its record, its user."""

    folder: Path
    tracking_uri: str
    experiment: str
    command: str
    """The command line that repeats the run."""
    resume: bool
    stopping: Callable[[], bool]
    """Whether the user has asked to stop."""
    console: Console
    """For the progress bar."""
    say: Callable[[str], None]
    """Shows one line to the user."""


def train(inputs: Inputs, settings: TrainSettings, around: Surroundings) -> Trained:
    """Train, or go on with what a kill has left.

    Raises:
        FlagError: the folder holds another run, or an unfinished one.
        TrainingError: figures are no numbers any more; the last checkpoint stays.
    """
    folder = RunFolder(around.folder)
    progress = folder.begin(inputs.identity(settings), resume=around.resume)
    inputs.write(around.folder / INPUTS_FOLDER, command=around.command)
    tracking = Tracking(
        around.folder, uri=around.tracking_uri, experiment=around.experiment, say=around.say
    )
    try:
        _record(tracking.log, inputs, settings, around.command)
        trained = _learn(folder, progress, inputs, settings, around, tracking)
        for name in POLICY_FILES:
            tracking.log.artifact(name, under="bundle")
        tracking.log.artifact(EVALUATION_NAME)
        tracking.log.tags({DIGEST_TAG: trained.digest})
    except BaseException:
        tracking.finish("FAILED")
        raise
    run_id = tracking.finish("KILLED" if trained.interrupted else "FINISHED")
    return replace(trained, run_id=run_id)


def version_tags(trained: Trained, inputs: Inputs) -> dict[str, str]:
    """What a registered version says of its bundle."""
    return {
        DIGEST_TAG: trained.digest,
        "plan_digest": inputs.plan.digest,
        "trace_digests": ",".join(named.digest for named in inputs.traces),
        "engine": inputs.spec.name,
    }


def _learn(
    folder: RunFolder,
    progress: Progress,
    inputs: Inputs,
    settings: TrainSettings,
    around: Surroundings,
    tracking: Tracking,
) -> Trained:
    from stable_baselines3.common.logger import Logger

    from trimtab.training.learning.steering import LogWriter, Steering

    _make_deterministic()
    env = _environments(folder, progress, inputs, settings)
    model = _model(folder, progress, settings, env)
    model.set_logger(Logger(folder=None, output_formats=[LogWriter(tracking.log)]))
    windows = inputs.validation_windows(settings)
    validator = Validator(
        windows,
        plan=inputs.plan,
        spec=inputs.spec,
        seeds=range(math.ceil(settings.validation_runs / len(windows))),
    )

    def write(model: BaseAlgorithm, target: Path, progress: Progress) -> None:
        write_policy(model, target, inputs=inputs, settings=settings, envelope=env.envelope,
                     step=progress.step)  # fmt: skip

    with ProgressBar(settings.steps, console=around.console) as bar:
        steering = Steering(
            folder, progress, settings, env=env, validator=validator, write=write,
            tracking=tracking, bar=bar, stopping=around.stopping,
        )  # fmt: skip
        left = settings.steps - int(model.num_timesteps)
        if left > 0:
            model.learn(
                left, callback=steering, reset_num_timesteps=progress.step == 0, log_interval=1
            )
        interrupted = around.stopping()
        if left > 0 and not interrupted:
            if progress.validated_step != int(model.num_timesteps):
                steering.validate()
            steering.save()
    env.close()
    if progress.best_step < 0:
        write(model, folder.best, progress)
    validation = steering.last
    if validation is None and not interrupted:
        validation = validator.validate(folder.best)
    digest = _deliver(folder, progress, validation)
    if not interrupted:
        folder.finish(progress)
    return Trained(
        folder=folder.path,
        digest=digest,
        step=int(model.num_timesteps),
        best_step=max(progress.best_step, 0),
        validation=validation,
        interrupted=interrupted,
        run_id=None,
    )


def _make_deterministic() -> None:
    import torch

    # Two layers of 64 gain nothing from a second thread, and sums would depend on their number.
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)


def _environments(
    folder: RunFolder, progress: Progress, inputs: Inputs, settings: TrainSettings
) -> WatchedEnv:
    from stable_baselines3.common.vec_env import VecMonitor

    from trimtab.envs.observation_schema import observation_schema
    from trimtab.training.learning.scenario_env import make_envs
    from trimtab.training.learning.watched_env import WatchedEnv

    envs = make_envs(
        inputs.training_spans(),
        plan=inputs.plan,
        spec=inputs.spec,
        window_s=settings.window_s,
        randomisation=settings.randomisation,
        count=settings.envs,
        # After a resumption other scenarios than those of the beginning.
        seed=(settings.seed, progress.step),
    )
    schema = observation_schema(inputs.plan)
    return WatchedEnv(
        VecMonitor(envs), names=schema.names, envelope=folder.load_envelope(schema.size)
    )


def _model(
    folder: RunFolder, progress: Progress, settings: TrainSettings, env: WatchedEnv
) -> BaseAlgorithm:
    import stable_baselines3

    from trimtab.training.learning.algorithms import make_model

    kind: Any = getattr(stable_baselines3, settings.algorithm)
    model = folder.load_model(kind, env)
    if model is None:
        return make_model(settings, env, folder=folder.path)
    model.set_random_seed(settings.seed + progress.step)
    return model


def _deliver(folder: RunFolder, progress: Progress, validation: Validation | None) -> str:
    """Put the best policy and its figures into the run's folder; the bundle's digest."""
    for name in POLICY_FILES:
        with replacing(folder.path / name) as part:
            shutil.copyfile(folder.best / name, part)
    report: dict[str, Any] = {"best_step": progress.best_step}
    if validation is not None:
        report |= validation.content()
    write_text(folder.path / EVALUATION_NAME, json.dumps(report, indent=2) + "\n")
    return read_bundle(folder.path).digest


def _record(log: RunLog, inputs: Inputs, settings: TrainSettings, command: str) -> None:
    """All that is needed to repeat the run."""
    from trimtab.training.learning.algorithms import hyperparameters

    log.params(settings.content())
    log.params({f"algorithm.{k}": v for k, v in hyperparameters(settings).items()})
    log.params({"plan": inputs.plan.name, "engine": inputs.spec.name})
    log.tags({"command": command, "plan_digest": inputs.plan.digest})
    log.tags({f"version.{name}": version for name, version in versions().items()})
    for context, traces in (("training", inputs.traces), ("validation", inputs.validation)):
        for named in traces:
            log.dataset(
                name=named.name,
                digest=named.digest,
                source=named.source,
                context=context,
                rows=len(named.trace),
            )
    log.artifact(INPUTS_FOLDER, under=INPUTS_FOLDER)

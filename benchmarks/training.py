"""Where training's time goes: the replay, the network, or what lies between them.

    python benchmarks/training.py [--steps 8192] [--load 0.9] [--json F]

One process trains PPO with the settings of `trimtab train` on generated traffic, and the CPU time
of each part is summed up: `replay` is the engines and their static twins, `network` the policy's
forward passes and updates, `glue` all the rest (windows, observations, actions, rewards, the
vector environment, callbacks).
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from trimtab.engine_bridge.engine_spec import get_engine_spec
from trimtab.engine_bridge.plan import load_plan
from trimtab.engine_bridge.replay.engine import ReplayEngine
from trimtab.training.learning.algorithms import make_model
from trimtab.training.learning.envelope import Envelope
from trimtab.training.learning.inputs import Inputs, NamedTrace
from trimtab.training.learning.scenario_env import make_envs
from trimtab.training.learning.settings import TrainSettings
from trimtab.training.learning.watched_env import WatchedEnv
from trimtab.training.traces.generate import generate

ENGINE = "h100:llama-3.1-8b-tp1"
HOURS = 1.0
REPLAY = ("__init__", "apply", "advance", "run", "result")
NETWORK = ("forward", "predict_values", "evaluate_actions")


class Stopwatch:
    """CPU time by part; a part inside another one is taken from it."""

    def __init__(self) -> None:
        """Begin with nothing spent."""
        self.spent_s: dict[str, float] = defaultdict(float)
        self._inside: list[list[float]] = []

    def wrap(self, owner: Any, name: str, part: str) -> Callable[[], None]:
        """Measure `owner.name`; what comes back undoes it."""
        before = getattr(owner, name)

        def measured(*arguments: Any, **keywords: Any) -> Any:
            start_s = time.thread_time()
            self._inside.append([0.0])
            try:
                return before(*arguments, **keywords)
            finally:
                whole_s = time.thread_time() - start_s
                (inner_s,) = self._inside.pop()
                self.spent_s[part] += whole_s - inner_s
                if self._inside:
                    self._inside[-1][0] += whole_s

        setattr(owner, name, measured)
        return lambda: setattr(owner, name, before)


@contextmanager
def measuring(watch: Stopwatch, model: Any) -> Iterator[None]:
    """Measure the parts while the block runs."""
    undo = [watch.wrap(ReplayEngine, name, "replay") for name in REPLAY]
    undo += [watch.wrap(model.policy, name, "network") for name in NETWORK]
    undo += [watch.wrap(model, "train", "network")]
    try:
        yield
    finally:
        for one in undo:
            one()


def main() -> None:
    """Train, print, and write the JSON file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=8192)
    parser.add_argument("--load", type=float, default=0.9)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    plan, spec = load_plan(), get_engine_spec(ENGINE)
    traffic = generate(hours=HOURS, seed=1, load=args.load, preset="steady")
    inputs = Inputs(traces=(NamedTrace("generated", traffic),), plan=plan, spec=spec)
    settings = TrainSettings(steps=args.steps, seed=1)
    envs = make_envs(
        inputs.training_spans(),
        plan=plan,
        spec=spec,
        window_s=settings.window_s,
        randomisation=settings.randomisation,
        count=settings.envs,
        seed=(1,),
    )
    size = envs.observation_space.shape[0]
    env = WatchedEnv(envs, names=[str(n) for n in range(size)], envelope=Envelope(size))
    with tempfile.TemporaryDirectory() as folder:
        model = make_model(settings, env, folder=Path(folder))
    # The first rollout loads compiled code.
    model.learn(1)
    watch = Stopwatch()
    start_s = time.thread_time()
    with measuring(watch, model):
        model.learn(args.steps, reset_num_timesteps=True)
    whole_s = time.thread_time() - start_s
    steps = int(model.num_timesteps)
    shares = {part: watch.spent_s[part] / whole_s for part in ("replay", "network")}
    shares["glue"] = 1 - sum(shares.values())
    print(f"{steps} steps in {whole_s:.1f} CPU-s: {steps / whole_s:.0f} a second")
    for part, share in shares.items():
        print(f"  {part:8s} {share:6.1%}  {1e6 * share * whole_s / steps:7.0f} us a step")
    if args.json:
        report = {"steps": steps, "cpu_s": whole_s, "steps_per_cpu_s": steps / whole_s}
        report |= {f"{part}_share": share for part, share in shares.items()}
        args.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()

"""Speed of the environment: control intervals per CPU-second, and where the time goes.

    python benchmarks/environment.py [--json F] [--repeats 5] [--minutes 20]

`trimtab/Allocation-v0` on a generated trace (`steady`) at 90 % load, control intervals of 2 s,
actions of a slow random walk over all default knobs. Times are CPU seconds of this process after
compilation; of the repeats the fastest counts: what else runs on the machine only slows it down.
The parts are timed from inside (a few microseconds of it is the clock itself): `replay` is the
compiled step loop, `apply` the projection to the plan's limits and the handing over, `telemetry`
what turns the replay's tables into values, `glue` the rest of a step. `twin_and_reset` is what an
episode costs before its first step, spread over its steps. `vectorised` steps the environment
eight times in Stable-Baselines3's DummyVecEnv, where that is installed.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from trimtab.engine_bridge.engine_spec import get_engine_spec
from trimtab.engine_bridge.replay import engine as replay_engine
from trimtab.engine_bridge.trace import Trace
from trimtab.envs.allocation_env import AllocationEnv
from trimtab.training.traces.generate import generate

ENGINES = ("h100:llama-3.1-8b-tp1", "h100:llama-3.1-70b-tp8")
LOAD = 0.9
SEED = 7
STRIDE = 0.1
COPIES = 8


class Stopwatch:
    """CPU seconds by part; a part inside another is not counted in the outer one."""

    def __init__(self) -> None:
        """Begin at 0."""
        self.spent_s: dict[str, float] = defaultdict(float)
        self._inner_s = [0.0]

    def around(self, part: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """The same call, timed."""

        def timed(*given: Any, **named: Any) -> Any:
            self._inner_s.append(0.0)
            started = time.thread_time()
            try:
                return call(*given, **named)
            finally:
                whole_s = time.thread_time() - started
                self.spent_s[part] += whole_s - self._inner_s.pop()
                self._inner_s[-1] += whole_s

        return timed


def random_walk(env: AllocationEnv, steps: int) -> np.ndarray:
    """Actions that wander through the box, shape (steps, entries)."""
    rng = np.random.default_rng(SEED)
    strides = rng.normal(scale=STRIDE, size=(steps, *env.action_space.shape))
    return np.clip(np.cumsum(strides, axis=0), -1.0, 1.0).astype(np.float32)


def play(env: AllocationEnv, actions: np.ndarray) -> int:
    """Step through an episode that has begun; the number of its steps."""
    for count, action in enumerate(actions, start=1):
        _, _, _, truncated, _ = env.step(action)
        if truncated:
            return count
    return len(actions)


def speed(env: AllocationEnv, trace: Trace, repeats: int) -> dict:
    """Intervals per CPU-second without a stopwatch inside."""
    actions = random_walk(env, 10 * int(trace.duration_s))
    play_s, reset_s, steps = [], [], 0
    for repeat in range(repeats):
        # A little faster each time, so that no twin is remembered.
        started = time.process_time()
        env.reset(seed=SEED, options={"trace": trace, "speed": 1.0 - 1e-9 * repeat})
        begun = time.process_time()
        steps = play(env, actions)
        play_s.append(time.process_time() - begun)
        reset_s.append(begun - started)
    return {
        "steps": steps,
        "intervals_per_cpu_s": round(steps / min(play_s)),
        "with_twin_and_reset": round(steps / (min(play_s) + min(reset_s))),
        "us_per_step": round(1e6 * min(play_s) / steps, 1),
        "twin_and_reset_us_per_step": round(1e6 * min(reset_s) / steps, 1),
    }


def split(env: AllocationEnv, trace: Trace) -> dict[str, float]:
    """Microseconds of a step by part."""
    actions = random_walk(env, 10 * int(trace.duration_s))
    watch = Stopwatch()
    env.reset(seed=SEED, options={"trace": trace})
    engine = env._episode.engine
    log = type(engine._log)
    kept = replay_engine.advance, replay_engine.close_interval, log.__getitem__
    env._actions.allocation = watch.around("action", env._actions.allocation)
    env._observer.observe = watch.around("observation", env._observer.observe)
    env._terms = watch.around("reward", env._terms)
    engine.apply = watch.around("apply", engine.apply)
    replay_engine.advance = watch.around("replay", replay_engine.advance)
    replay_engine.close_interval = watch.around("telemetry", replay_engine.close_interval)
    log.__getitem__ = watch.around("telemetry", log.__getitem__)
    try:
        steps = watch.around("glue", play)(env, actions)
    finally:
        replay_engine.advance, replay_engine.close_interval, log.__getitem__ = kept
        del env._actions.allocation, env._observer.observe, env._terms
    return {part: round(1e6 * s / steps, 1) for part, s in sorted(watch.spent_s.items())}


def vectorised(trace: Trace, engine: str) -> float:
    """Intervals per CPU-second of eight environments in a DummyVecEnv, before any episode ends."""
    from stable_baselines3.common.vec_env import DummyVecEnv

    envs = DummyVecEnv([lambda: AllocationEnv(trace, engine=engine) for _ in range(COPIES)])
    envs.reset()
    steps = int(trace.duration_s / 2) - 1
    actions = np.repeat(random_walk(envs.envs[0].unwrapped, steps)[:, None], COPIES, axis=1)
    started = time.process_time()
    for action in actions:
        envs.step(action)
    return round(steps * COPIES / (time.process_time() - started))


def measure(engine: str, minutes: float, repeats: int) -> dict:
    """All figures for one engine."""
    spec = get_engine_spec(engine)
    trace = generate(hours=minutes / 60, preset="steady", load=LOAD, spec=spec, seed=SEED)
    env = AllocationEnv(trace, engine=spec)
    # Compiles.
    env.reset(seed=SEED, options={"trace": trace.head(200)})
    play(env, random_walk(env, 50))
    found: dict[str, Any] = {
        "engine": engine,
        "requests": len(trace),
        "requests_per_interval": round(len(trace) / trace.duration_s * 2, 1),
        **speed(env, trace, repeats),
        "split_us": split(env, trace),
    }
    if importlib.util.find_spec("stable_baselines3") is not None:
        found["vectorised_intervals_per_cpu_s"] = vectorised(trace, engine)
    return found


def main() -> None:
    """Measure, print, and write the JSON file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--minutes", type=float, default=20.0)
    args = parser.parse_args()
    found = {"engines": [measure(engine, args.minutes, args.repeats) for engine in ENGINES]}
    text = json.dumps(found, indent=2)
    print(text)
    if args.json:
        args.json.write_text(text + "\n")


if __name__ == "__main__":
    main()

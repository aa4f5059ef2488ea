"""`trimtab/Allocation-v0`: a Gymnasium environment over any engine, one step a control interval.

It puts the parts together: `action`, an engine with its own limits, `observation`, `reward` and
`episode`. It decides nothing itself and cuts no windows out of traces.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import numpy.typing as npt

from trimtab.engine_bridge.allocation import Allocation
from trimtab.engine_bridge.engine_spec import EngineSpec, get_engine_spec
from trimtab.engine_bridge.errors import EpisodeError, did_you_mean
from trimtab.engine_bridge.plan import Plan, load_plan
from trimtab.engine_bridge.telemetry import Telemetry
from trimtab.engine_bridge.trace import Trace
from trimtab.envs.action import DEFAULT_KNOBS, DEFAULT_REACH, ActionMap
from trimtab.envs.episode import EngineSource, Episode, EpisodeMaker
from trimtab.envs.episode_plot import EpisodePlot, check_installed
from trimtab.envs.observation import Observation, Observer
from trimtab.envs.poisson_traffic import PoissonTraffic
from trimtab.envs.residual import Residual, distance
from trimtab.envs.reward import Reward, RewardSettings, RewardTerms, total

Image = npt.NDArray[np.uint8]

DEFAULT_ENGINE = "h100:llama-3.1-8b-tp1"
_OPTIONS = ("trace", "speed")


class AllocationEnv(gymnasium.Env[Observation, npt.NDArray[np.float32]]):
    """Sets an engine's knobs once a control interval; docs/environment.md is for its users.

    * action: `Box(-1, 1, (n,))`, residuals on the static plan (`action_schema`); zeros are it
    * observation: `Box(-1, 1, (m,))` (`observation_schema`), the same as in the daemon
    * reward: `envs.reward`, its terms in `info["reward_terms"]`
    * an episode is a continuing task cut short: it is `truncated` at its last interval, when
      nothing is left to serve, or after `drain_s`; it is never `terminated`

    `reset` runs one interval on the static plan, for the first observation. `info` holds
    `telemetry`, `applied` and `time_s`; after a reset also `trace` (its name), `speed` and `twin`
    (whether the reward is relative to the static plan); after a step `requested` and
    `reward_terms`; after the last one `weighted_attainment` of the episode.
    """

    metadata = {"render_modes": ["rgb_array"], "render_fps": 4}  # noqa: RUF012 - as in gymnasium

    def __init__(
        self,
        traces: Trace | Mapping[str, Trace] | None = None,
        *,
        plan: Plan | Path | str | None = None,
        engine: EngineSpec | Path | str = DEFAULT_ENGINE,
        engines: EngineSource | None = None,
        episode_intervals: int | None = None,
        drain_s: float = 600.0,
        speeds: tuple[float, float] = (1.0, 1.0),
        late_probability: float = 0.0,
        knobs: Sequence[str] = DEFAULT_KNOBS,
        reach: Mapping[str, float] = DEFAULT_REACH,
        reward: RewardSettings | None = None,
        render_mode: str | None = None,
    ) -> None:
        """Set the environment up; `reset` begins an episode.

        Args:
            traces: The traffic, or several by name, of which each episode draws one. None: Poisson
                arrivals, drawn anew for each episode (`PoissonTraffic`).
            plan: A plan, its file or its shipped name; its `controller.interval_s` is a step.
            engine: The engine that is replayed: its facts, its name or its file.
            engines: Makes another engine of a trace and a speed; no twin then (`envs.twin`).
            episode_intervals: Steps of an episode. None: until the trace has drained.
            drain_s: Most seconds that such an episode goes on after the last arrival.
            speeds: Least and greatest speed of an episode's engine, drawn evenly: true step time
                over the model's, so above 1 is slower.
            late_probability: Chance that an interval's telemetry has not come when the policy acts:
                it sees the last one that has, older by an interval.
            knobs: As for `ActionMap`.
            reach: As for `ActionMap`.
            reward: Coefficients; None: the defaults.
            render_mode: `rgb_array` for a plot of the episode so far; it needs matplotlib.

        Raises:
            ActionError: `knobs` or `reach` do not fit the plan.
            EpisodeError: a setting is out of its bounds, or matplotlib is missing for a plot.
            PlanError: no such plan.
            EngineSpecError: no such engine.
        """
        _check_settings(traces, episode_intervals, drain_s, speeds, late_probability, render_mode)
        self.plan = plan if isinstance(plan, Plan) else load_plan(plan)
        self.engine_spec = engine if isinstance(engine, EngineSpec) else get_engine_spec(engine)
        self._traces = {"trace": traces} if isinstance(traces, Trace) else traces
        self._poisson: PoissonTraffic | None = None
        self._speeds = speeds
        self._late_probability = late_probability
        self._actions = ActionMap(self.plan, knobs, reach)
        self._observer = Observer(self.plan)
        self._residual = Residual(self.plan)
        self._reward = Reward(self.plan, reward or RewardSettings())
        self._maker = EpisodeMaker(
            self.plan,
            self.engine_spec,
            self._reward,
            engines=engines,
            episode_intervals=episode_intervals,
            drain_s=drain_s,
        )
        self.action_schema = self._actions.schema
        self.observation_schema = self._observer.schema
        self.action_space = gymnasium.spaces.Box(-1.0, 1.0, (self._actions.size,), np.float32)
        self.observation_space = gymnasium.spaces.Box(
            -1.0, 1.0, (self.observation_schema.size,), np.float32
        )
        if render_mode is not None:
            check_installed()
        self.render_mode = render_mode
        self._plot: EpisodePlot | None = None
        self._episode: Episode | None = None

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        """Begin an episode and run its first interval, on the static plan.

        Args:
            seed: Of what is drawn from now on; None goes on drawing.
            options: `trace`: a trace, or the name of one of `traces`; `speed`: of the engine. What
                is not given is drawn.

        Raises:
            EpisodeError: an option is not known, or its value is not.
            TraceError: the trace does not fit the plan or the engine.
        """
        super().reset(seed=seed)
        name, trace, speed = self._draw(options or {})
        self.close()
        self._episode = episode = self._maker.make(name, trace, speed)
        self._interval = 0
        self._over = False
        self._observer.reset()
        telemetry = episode.engine.advance(self.plan.controller.interval_s)
        self._seen = telemetry
        self._applied = self._residual.of(episode.engine.allocation)
        if self.render_mode is not None:
            self._plot = EpisodePlot(self.plan, self.action_schema.knobs, name)
            self._plot.add(telemetry, None)
        info = self._info(telemetry, episode.engine.allocation)
        info |= {"trace": name, "speed": speed, "twin": episode.twin is not None}
        return self._observer.observe(telemetry), info

    def step(
        self, action: npt.NDArray[np.float32]
    ) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        """Ask for an allocation and run one interval under what is applied of it.

        Raises:
            ActionError: the action has another shape, or an entry that is no number.
            gymnasium.error.ResetNeeded: no episode runs.
        """
        episode = self._episode
        if episode is None or self._over:
            raise gymnasium.error.ResetNeeded("no episode runs: call reset")
        requested = self._actions.allocation(action)
        controller = self.plan.controller
        applied = episode.engine.apply(requested, ttl_s=controller.lease_s)
        telemetry = episode.engine.advance(controller.interval_s)
        self._interval += 1
        self._over = episode.engine.finished or self._interval >= episode.intervals - 1
        terms = self._terms(episode, telemetry, requested, applied)
        info = self._info(telemetry, applied)
        info |= {"requested": requested, "reward_terms": terms}
        if self._over:
            info["weighted_attainment"] = episode.weighted_attainment(self.plan)
        if self._plot is not None:
            self._plot.add(telemetry, terms)
        return (
            self._observer.observe(self._arrived(telemetry)),
            total(terms),
            False,
            self._over,
            info,
        )

    def close(self) -> None:
        """End the episode and give back what its engine holds."""
        episode, self._episode = self._episode, None
        if episode is not None:
            episode.close()

    def render(self) -> Image | None:
        """The episode so far as an image, shape (height, width, 3); None without a render mode."""
        return None if self._plot is None else self._plot.draw()

    def _draw(self, options: Mapping[str, Any]) -> tuple[str, Trace, float]:
        for key in options:
            if key not in _OPTIONS:
                raise EpisodeError(
                    "reset options",
                    key=key,
                    bound=f"one of {', '.join(_OPTIONS)}",
                    remedy=did_you_mean(key, _OPTIONS),
                )
        speed = options.get("speed")
        if speed is None:
            speed = float(self.np_random.uniform(*self._speeds))
        elif not (isinstance(speed, (int, float)) and 0 < speed < math.inf):
            raise EpisodeError("reset options", key="speed", value=speed, bound="a number above 0")
        name, trace = self._chosen(options.get("trace"))
        return name, trace, float(speed)

    def _chosen(self, asked: object) -> tuple[str, Trace]:
        if isinstance(asked, Trace):
            return "given", asked
        known = self._traces or {}
        if asked is None and not known:
            self._poisson = self._poisson or PoissonTraffic(self.plan, self.engine_spec)
            return "Poisson", self._poisson.draw(self.np_random)
        if asked is None:
            asked = list(known)[int(self.np_random.integers(len(known)))]
        if not isinstance(asked, str) or asked not in known:
            raise EpisodeError(
                "reset options",
                key="trace",
                value=asked,
                bound="a Trace" + "".join(f", {name}" for name in known),
                remedy=did_you_mean(asked, known),
            )
        return asked, known[asked]

    def _terms(
        self, episode: Episode, telemetry: Telemetry, requested: Allocation, applied: Allocation
    ) -> RewardTerms:
        before, self._applied = self._applied, self._residual.of(applied)
        asked = self._residual.of(requested)
        twin = episode.twin
        return self._reward.terms(
            telemetry,
            episode.offered_value_per_s,
            moved=distance(self._applied, before),
            beyond=distance(asked, self._applied),
            twin=0.0 if twin is None else twin.earned(self._interval, last=self._over),
        )

    def _arrived(self, telemetry: Telemetry) -> Telemetry:
        """The telemetry that the policy gets to see."""
        late = self._late_probability
        if late > 0 and self.np_random.random() < late:
            age_s = self._seen.age_s + telemetry.interval_s
            self._seen = replace(self._seen, age_s=age_s)
        else:
            self._seen = telemetry
        return self._seen

    def _info(self, telemetry: Telemetry, applied: Allocation) -> dict[str, Any]:
        return {"telemetry": telemetry, "applied": applied, "time_s": telemetry.time_s}


def _check_settings(
    traces: object,
    episode_intervals: int | None,
    drain_s: float,
    speeds: tuple[float, float],
    late_probability: float,
    render_mode: str | None,
) -> None:
    """Refuse settings out of their bounds; comparisons with NaN are false."""
    if not (
        traces is None or isinstance(traces, Trace) or (isinstance(traces, Mapping) and traces)
    ):
        raise EpisodeError(
            "environment",
            key="traces",
            value=traces,
            bound="a Trace or a mapping from names to traces",
            remedy="read a file with trimtab.training.traces.read_trace",
        )
    for key, value, right, bound in (
        (
            "episode_intervals",
            episode_intervals,
            episode_intervals is None or episode_intervals >= 1,
            "at least 1",
        ),
        ("drain_s", drain_s, 0 <= drain_s < math.inf, "at least 0 and finite"),
        (
            "speeds",
            speeds,
            len(speeds) == 2 and 0 < speeds[0] <= speeds[1] < math.inf,
            "least and greatest, above 0",
        ),
        ("late_probability", late_probability, 0 <= late_probability < 1, "at least 0, below 1"),
        ("render_mode", render_mode, render_mode in (None, "rgb_array"), "rgb_array or None"),
    ):
        if not right:
            raise EpisodeError("environment", key=key, value=value, bound=bound)

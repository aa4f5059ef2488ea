"""A picture of an episode so far: the allocation, the attainment of each tier, the reward.

It needs matplotlib, which only drawing imports. It opens no window and keeps no global state.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from trimtab.engine_bridge.errors import EpisodeError
from trimtab.engine_bridge.plan import Plan
from trimtab.engine_bridge.telemetry import Telemetry
from trimtab.envs.observation_schema import SLOW_S
from trimtab.envs.residual import DIFFERENCE, RESIDUALS, Residual, open_entries
from trimtab.envs.reward import RewardTerms, total

Image = npt.NDArray[np.uint8]

_INCHES: Final = (9.6, 8.0)
_DOTS_PER_INCH: Final = 100
_COLOURS: Final = (
    "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7f7f7f", "#000000",
)  # fmt: skip
"""Told apart by the colour-blind (Okabe and Ito), one a tier or pool."""
_TITLES: Final = {
    "weights": "Weights",
    "kv_fractions": "KV fractions",
    "prefill_shares": "Prefill shares",
    "shed_at": "Shed at",
}


def check_installed() -> None:
    """Refuse to plot without matplotlib, before an episode has been played for it.

    Raises:
        EpisodeError: matplotlib is not installed.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise EpisodeError(
            "environment",
            key="render_mode",
            value="rgb_array",
            bound="None where matplotlib is missing",
            remedy="pip install 'trimtab[train]'",
        )


class EpisodePlot:
    """Collects an episode interval by interval and draws it on demand."""

    def __init__(self, plan: Plan, knobs: Sequence[str], traffic: str) -> None:
        """Begin without an interval.

        Args:
            plan: Of the episode.
            knobs: Those that are acted on.
            traffic: Name of its trace.
        """
        self._plan = plan
        self._traffic = traffic
        self._residual = Residual(plan)
        self._knobs = knobs
        self._time_s: list[float] = []
        self._moved: list[list[float]] = []
        self._attainment: list[list[float]] = []
        self._met = np.zeros(len(plan.tiers))
        self._judged = np.zeros(len(plan.tiers))
        self._rewards: list[float] = []

    def add(self, telemetry: Telemetry, terms: RewardTerms | None) -> None:
        """Take an interval in; without terms it is the one before the first action."""
        self._time_s.append(telemetry.time_s)
        self._moved.append(self._residual.of(telemetry.applied))
        keep = np.exp(-telemetry.interval_s / SLOW_S)
        samples = np.array([float(tier.attainment_samples) for tier in telemetry.tiers])
        share = np.array([tier.attainment for tier in telemetry.tiers])
        self._met = keep * self._met + np.where(samples > 0, share, 0.0) * samples
        self._judged = keep * self._judged + samples
        self._attainment.append(
            [m / j if j > 0 else np.nan for m, j in zip(self._met, self._judged, strict=True)]
        )
        self._rewards.append(0.0 if terms is None else total(terms))

    def draw(self) -> Image:
        """The plot as RGB, shape (height, width, 3)."""
        agg = importlib.import_module("matplotlib.backends.backend_agg")
        figures = importlib.import_module("matplotlib.figure")
        figure = figures.Figure(figsize=_INCHES, dpi=_DOTS_PER_INCH, layout="constrained")
        canvas = agg.FigureCanvasAgg(figure)
        panels = self._panels()
        axes = figure.subplots(len(panels) + 2, 1, sharex=True, squeeze=False)[:, 0]
        figure.suptitle(f"Episode on {self._traffic}, plan {self._plan.name}", fontsize=11)
        for axis, (title, lines) in zip(axes, panels.items(), strict=False):
            self._draw_residuals(axis, title, lines)
        self._draw_attainment(axes[-2])
        self._draw_reward(axes[-1])
        axes[-1].set_xlabel("Time, seconds")
        canvas.draw()
        return np.asarray(canvas.buffer_rgba())[:, :, :3].copy()

    def _panels(self) -> dict[str, list[tuple[str, int]]]:
        """Title of each panel about the allocation: names and columns of its lines."""
        panels: dict[str, list[tuple[str, int]]] = {}
        column = 0
        for knob, names in open_entries(self._plan).items():
            for name in names:
                if knob in self._knobs:
                    title = _TITLES.get(knob, "Other knobs")
                    label = name.removeprefix(f"{knob}.").replace("_", " ")
                    if RESIDUALS[knob] == DIFFERENCE:
                        label += " (added)"
                    panels.setdefault(title, []).append((label, column))
                column += 1
        return panels

    def _draw_residuals(self, axis: Any, title: str, lines: list[tuple[str, int]]) -> None:
        moved = np.array(self._moved)
        for number, (label, column) in enumerate(lines):
            values = moved[:, column]
            factor = values if label.endswith("(added)") else 10.0**values - 1.0
            colour = _COLOURS[number % len(_COLOURS)]
            axis.step(self._time_s, 100 * factor, where="pre", label=label, color=colour, lw=1.3)
        axis.axhline(0.0, color="#999999", lw=0.8)
        _finish(axis, f"{title}\n% off static")

    def _draw_attainment(self, axis: Any) -> None:
        for number, (name, tier) in enumerate(self._plan.tiers.items()):
            colour = _COLOURS[number % len(_COLOURS)]
            share = 100 * np.array(self._attainment)[:, number]
            axis.plot(self._time_s, share, label=name, color=colour, lw=1.3)
            if not tier.targets.best_effort:
                axis.axhline(100 * tier.targets.attainment, color=colour, lw=0.8, ls=":")
        axis.set_ylim(-3, 103)
        _finish(axis, "Attainment\n% over 60 s")

    def _draw_reward(self, axis: Any) -> None:
        width = self._plan.controller.interval_s
        label = "of the interval"
        axis.bar(self._time_s, self._rewards, width=width, color="#bbbbbb", label=label)
        axis.plot(self._time_s, np.cumsum(self._rewards), color="#000000", lw=1.3, label="sum")
        axis.axhline(0.0, color="#999999", lw=0.8)
        _finish(axis, "Reward")


def _finish(axis: Any, label: str) -> None:
    axis.set_ylabel(label, fontsize=8)
    axis.tick_params(labelsize=7)
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(
        loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize=7, frameon=False, handlelength=1.2
    )

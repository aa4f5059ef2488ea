"""The learned policy: a bundle's network over the environment's own observations and actions.

Numpy only; training and its libraries are elsewhere. It is not safe alone: `guard` goes around it.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from trimtab.agents.bundle import Bundle, Layer
from trimtab.agents.policy import Policy
from trimtab.engine_bridge import limits
from trimtab.engine_bridge.allocation import Allocation
from trimtab.engine_bridge.errors import BundleError
from trimtab.engine_bridge.plan import Plan
from trimtab.engine_bridge.telemetry import Telemetry
from trimtab.envs.action import ActionMap
from trimtab.envs.observation import Observer

Float32Array = npt.NDArray[np.float32]

ENVELOPE_MARGIN: Final = 0.05
"""How far beyond the range of training an observation, in [-1, 1], still counts as known."""


class LearnedPolicy(Policy):
    """A network from observation to action, the action's mean, held to the plan's limits.

    A network of zeros is the static plan, bit for bit.
    """

    name = "learned"
    summary = "a trained network over the fair scheduler's knobs, behind the guard"

    def __init__(self, bundle: Bundle) -> None:
        """Take a bundle; whether it fits the plan shows at `reset`.

        Args:
            bundle: What `read_bundle` gave.
        """
        self.bundle = bundle

    def _reset(self, plan: Plan, seed: int) -> None:
        bundle = self.bundle
        bundle.check_plan(plan)
        self._observer = Observer(plan)
        _agree("observation.digest", bundle.observation_digest, self._observer.schema.digest, plan)
        schema = bundle.action_schema
        self._actions = ActionMap(plan, knobs=schema.knobs, reach=schema.reach)
        _agree("action.digest", schema.digest, self._actions.schema.digest, plan)
        self._low = bundle.envelope_low - np.float32(ENVELOPE_MARGIN)
        self._high = bundle.envelope_high + np.float32(ENVELOPE_MARGIN)
        self.outside_fraction = 0.0

    def _act(self, telemetry: Telemetry, plan: Plan) -> Allocation:
        observation = self._observer.observe(telemetry)
        outside = (observation < self._low) | (observation > self._high)
        self.outside_fraction = float(outside.mean())
        proposal = self._actions.allocation(forward(self.bundle.layers, observation))
        return limits.project(proposal, telemetry.applied, plan).allocation


def forward(layers: tuple[Layer, ...], observation: Float32Array) -> Float32Array:
    """The action for an observation: layers with a tanh between them, clipped to [-1, 1].

    Args:
        layers: As in `Bundle.layers`.
        observation: Shape (inputs,).

    Returns:
        Shape (outputs,).
    """
    values = observation
    for place, (weights, biases) in enumerate(layers):
        values = (np.tanh(values) if place else values) @ weights + biases
    return np.clip(values, np.float32(-1.0), np.float32(1.0))


def _agree(key: str, own: str, theirs: str, plan: Plan) -> None:
    if own != theirs:
        raise BundleError(
            "bundle",
            key=key,
            value=own,
            bound=f"{theirs}, as this version and plan {plan.name} have it",
            remedy="train a policy with this version under this plan",
        )

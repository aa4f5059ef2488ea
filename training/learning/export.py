"""From a trained actor to plain layers: what a bundle's numpy forward pass computes.

Every actor ends as a tanh network whose clipped output is the action. It trains nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from trimtab.agents.bundle import Bundle, write_bundle
from trimtab.engine_bridge.errors import TrainingError
from trimtab.envs.action import ActionMap
from trimtab.envs.observation_schema import observation_schema
from trimtab.training.learning.envelope import Envelope
from trimtab.training.learning.inputs import Inputs, versions
from trimtab.training.learning.settings import TrainSettings

if TYPE_CHECKING:
    from stable_baselines3.common.base_class import BaseAlgorithm

Layer = tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]
"""Weights of shape (inputs, outputs) and biases of shape (outputs,)."""


def actor_layers(model: BaseAlgorithm) -> tuple[Layer, ...]:
    """The layers of the model's deterministic actor; between two of them lies a tanh.

    An actor that squashes its output by a tanh of its own ends in one more layer that changes
    nothing: it puts that tanh between two layers, where all others are.

    Raises:
        TrainingError: the actor is no such network.
    """
    policy: Any = model.policy
    if hasattr(policy, "mlp_extractor"):
        return _layers([*policy.mlp_extractor.policy_net, policy.action_net], squashed=False)
    actor = policy.actor
    if hasattr(actor, "latent_pi"):
        return _layers([*actor.latent_pi, actor.mu], squashed=True)
    *modules, squash = actor.mu
    _expect(squash, "Tanh")
    return _layers(modules, squashed=True)


def _layers(modules: Iterable[Any], *, squashed: bool) -> tuple[Layer, ...]:
    found: list[Layer] = []
    for place, module in enumerate(modules):
        if place % 2:
            _expect(module, "Tanh")
            continue
        _expect(module, "Linear")
        weights = module.weight.detach().cpu().numpy().T
        found.append(
            (
                np.ascontiguousarray(weights, np.float32),
                np.ascontiguousarray(module.bias.detach().cpu().numpy(), np.float32),
            )
        )
    if squashed:
        size = len(found[-1][1])
        found.append((np.eye(size, dtype=np.float32), np.zeros(size, np.float32)))
    return tuple(found)


def _expect(module: Any, kind: str) -> None:
    if type(module).__name__ != kind:
        raise TrainingError(
            f"the actor has a {type(module).__name__} where a {kind} was expected: it cannot be "
            "exported"
        )


def write_policy(
    model: BaseAlgorithm,
    target: Path,
    *,
    inputs: Inputs,
    settings: TrainSettings,
    envelope: Envelope,
    step: int,
) -> None:
    """Write the model's policy of the moment as a bundle into `target`."""
    observation = observation_schema(inputs.plan)
    action = ActionMap(inputs.plan).schema
    low, high = envelope.bounds()
    target.mkdir(parents=True, exist_ok=True)
    write_bundle(
        Bundle(
            observation_digest=observation.digest,
            action_schema=action,
            layers=actor_layers(model),
            envelope_low=low,
            envelope_high=high,
            plan_digest=inputs.plan.digest,
            tier_names=inputs.plan.tier_names,
            pool_names=inputs.plan.pool_names,
            trace_digests=tuple(named.digest for named in inputs.traces),
            versions=versions(),
            training={**settings.content(), "step": step},
        ),
        target,
    )

"""Bundles for tests: networks of any numbers that fit a plan."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from trimtab.agents.bundle import Bundle
from trimtab.engine_bridge.plan import Plan
from trimtab.envs.action import ActionMap
from trimtab.envs.observation_schema import observation_schema


def zero_bundle(plan: Plan, hidden: int = 8) -> Bundle:
    """A network of zeros, whose action is the static plan."""
    observation, action = observation_schema(plan), ActionMap(plan).schema
    sizes = (observation.size, hidden, len(action.names))
    return Bundle(
        observation_digest=observation.digest,
        action_schema=action,
        layers=tuple(
            (_zeros(inputs, outputs), _zeros(outputs)) for inputs, outputs in pairwise(sizes)
        ),
        envelope_low=np.full(observation.size, -1, np.float32),
        envelope_high=np.ones(observation.size, np.float32),
        plan_digest=plan.digest,
        tier_names=plan.tier_names,
        pool_names=plan.pool_names,
        trace_digests=("ab" * 32,),
        training={"algorithm": "none", "seed": 1},
        versions={"trimtab": "0.1.0"},
    )


def random_bundle(plan: Plan, seed: int, scale: float = 0.5) -> Bundle:
    """A network of drawn numbers."""
    rng = np.random.default_rng(seed)
    bundle = zero_bundle(plan)
    return replace(
        bundle,
        layers=tuple(
            (
                rng.normal(0, scale, weights.shape).astype(np.float32),
                rng.normal(0, scale, biases.shape).astype(np.float32),
            )
            for weights, biases in bundle.layers
        ),
    )


def _zeros(*shape: int) -> npt.NDArray[np.float32]:
    return np.zeros(shape, np.float32)

"""The policy bundle: a trained network and all that must agree before it may act, in two files.

policy.json says what it is, policy.npz holds the numbers; neither is pickle. It computes no action:
see `learned`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from trimtab.agents.arrays import check_array, read_arrays, write_arrays
from trimtab.agents.manifest import FORMAT, MOST_LAYERS, Manifest, canonical, read_manifest
from trimtab.engine_bridge.atomic import replacing
from trimtab.engine_bridge.errors import BundleError, did_you_mean
from trimtab.engine_bridge.plan import Plan
from trimtab.envs.action import DEFAULT_KNOBS, ActionSchema

Float32Array = npt.NDArray[np.float32]
Layer = tuple[Float32Array, Float32Array]
"""Weights of shape (inputs, outputs) and biases of shape (outputs,)."""

MANIFEST_NAME: Final = "policy.json"
ARRAYS_NAME: Final = "policy.npz"
_ENVELOPE: Final = ("envelope_low", "envelope_high")


@dataclass(frozen=True, kw_only=True, eq=False)
class Bundle:
    """A trained policy. Equal training gives an equal `digest`, on any machine."""

    observation_digest: str
    """Of the observation's schema."""
    action_schema: ActionSchema
    """What each output of the network moves."""
    layers: tuple[Layer, ...]
    """The network, float32; a tanh lies between two layers, the last output is the action."""
    activation: str = "tanh"
    """What lies between two layers."""
    envelope_low: Float32Array
    """0.1 % quantile of each observation in training, shape (observations,)."""
    envelope_high: Float32Array
    """99.9 % quantile of each observation in training, shape (observations,)."""
    plan_digest: str
    """Of the plan that it was trained under."""
    tier_names: tuple[str, ...]
    """The plan's tiers, in order."""
    pool_names: tuple[str, ...]
    """The plan's pools, in order."""
    trace_digests: tuple[str, ...] = ()
    """Of the traces that it was trained on."""
    training: Mapping[str, Any] = field(default_factory=dict)
    """How it was trained: JSON, and part of the digest, so no times and no run ids."""
    versions: Mapping[str, str] = field(default_factory=dict)
    """What it was made with, run ids and times too: not part of the digest."""

    @cached_property
    def digest(self) -> str:
        """SHA-256 in hex of all but `versions`."""
        content = self._content()
        del content["versions"]
        hashed = hashlib.sha256(canonical(content).encode())
        for name, array in self.arrays().items():
            hashed.update(f"{name} {array.shape}".encode())
            hashed.update(np.ascontiguousarray(array, "<f4").tobytes())
        return hashed.hexdigest()

    def arrays(self) -> dict[str, Float32Array]:
        """The arrays of policy.npz by name."""
        named: dict[str, Float32Array] = {}
        for place, (weights, biases) in enumerate(self.layers):
            named[f"layer{place}_weights"], named[f"layer{place}_biases"] = weights, biases
        named["envelope_low"], named["envelope_high"] = self.envelope_low, self.envelope_high
        return named

    def check_plan(self, plan: Plan) -> None:
        """Refuse a plan with other tiers or pools than the policy was trained for.

        Raises:
            BundleError: names or their order differ.
        """
        for key, own, theirs in (
            ("plan.tiers", self.tier_names, plan.tier_names),
            ("plan.pools", self.pool_names, plan.pool_names),
        ):
            if own != theirs:
                raise BundleError(
                    "bundle",
                    key=key,
                    value=", ".join(own),
                    bound=f"those of plan {plan.name}, {', '.join(theirs)}",
                    remedy="train a policy under this plan",
                )

    def _content(self) -> dict[str, Any]:
        """The text of policy.json without the digest."""
        action = self.action_schema
        return {
            "format": FORMAT,
            "observation": {
                "digest": self.observation_digest,
                "size": int(self.layers[0][0].shape[0]),
            },
            "action": {
                "digest": action.digest,
                "names": list(action.names),
                "knobs": list(action.knobs),
                "reach": dict(action.reach),
            },
            "network": {
                "activation": self.activation,
                "shapes": [[int(n) for n in weights.shape] for weights, _ in self.layers],
            },
            "plan": {
                "digest": self.plan_digest,
                "tiers": list(self.tier_names),
                "pools": list(self.pool_names),
            },
            "traces": list(self.trace_digests),
            "training": dict(self.training),
            "versions": dict(self.versions),
        }


def write_bundle(bundle: Bundle, folder: Path) -> str:
    """Write both files into a folder, each whole or not at all; answers with the digest.

    A kill between the two leaves a pair that `read_bundle` refuses, never half a bundle that acts.

    Raises:
        BundleError: the bundle is not consistent, or the folder cannot be written.
    """
    where = str(folder)
    _check(bundle, where)
    try:
        content = bundle._content()
        text = json.dumps({**content, "digest": bundle.digest}, indent=1, allow_nan=False)
    except (TypeError, ValueError) as fault:
        raise BundleError(where, key="training", value=str(fault), bound="JSON") from None
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with (
            replacing(folder / MANIFEST_NAME) as manifest,
            replacing(folder / ARRAYS_NAME) as arrays,
        ):
            manifest.write_text(text + "\n", encoding="utf-8", newline="\n")
            write_arrays(arrays, bundle.arrays())
    except OSError as fault:
        raise BundleError(
            where, value=fault.strerror, bound="a folder to write in", remedy="choose another one"
        ) from None
    return bundle.digest


def read_bundle(folder: Path) -> Bundle:
    """Read a bundle and check that it is whole.

    Whether it fits a plan, and this version's observations, is checked when it is reset.

    Raises:
        BundleError: a file is missing, too large, of an unknown format, broken, or does not agree
            with the other or with this version of Trimtab.
    """
    if not folder.is_dir():
        raise BundleError(
            f"bundle {folder}", value="no such folder", remedy=_nearest_bundle(folder)
        )
    manifest = read_manifest(folder / MANIFEST_NAME)
    where = str(folder / MANIFEST_NAME)
    arrays = read_arrays(folder / ARRAYS_NAME, _shapes(manifest))
    bundle = Bundle(
        observation_digest=manifest.observation.digest,
        action_schema=_action_schema(manifest, where),
        layers=tuple(
            (arrays[f"layer{place}_weights"], arrays[f"layer{place}_biases"])
            for place in range(len(manifest.network.shapes))
        ),
        activation=manifest.network.activation,
        envelope_low=arrays["envelope_low"],
        envelope_high=arrays["envelope_high"],
        plan_digest=manifest.plan.digest,
        tier_names=tuple(manifest.plan.tiers),
        pool_names=tuple(manifest.plan.pools),
        trace_digests=tuple(manifest.traces),
        training=manifest.training,
        versions=manifest.versions,
    )
    _check(bundle, where)
    if bundle.digest != manifest.digest:
        raise BundleError(
            where,
            key="digest",
            value=manifest.digest,
            bound=f"{bundle.digest}, that of the content",
            remedy="a file was changed or belongs to another bundle: copy both again",
        )
    return bundle


def _check(bundle: Bundle, where: str) -> None:
    """Refuse a network whose parts do not fit together, or hold what is no number."""
    if not 1 <= len(bundle.layers) <= MOST_LAYERS:
        raise BundleError(
            where, key="layers", value=len(bundle.layers), bound=f"1 to {MOST_LAYERS}"
        )
    inputs = len(bundle.envelope_low)
    for place, (weights, biases) in enumerate(bundle.layers):
        outputs = int(np.shape(biases)[0]) if np.ndim(biases) == 1 else -1
        check_array(where, f"layer{place}_weights", weights, (inputs, outputs))
        check_array(where, f"layer{place}_biases", biases, (outputs,))
        inputs = outputs
    if inputs != len(bundle.action_schema.names):
        raise BundleError(
            where,
            key="network",
            value=f"{inputs} outputs",
            bound=f"{len(bundle.action_schema.names)}, one for each entry of the action",
        )
    size = len(bundle.envelope_low)
    for name in _ENVELOPE:
        check_array(where, name, getattr(bundle, name), (size,))
    wrong = np.flatnonzero(bundle.envelope_low > bundle.envelope_high)
    if len(wrong):
        at = int(wrong[0])
        raise BundleError(
            where,
            key=f"envelope_low[{at}]",
            value=float(bundle.envelope_low[at]),
            bound=f"at most envelope_high[{at}], {float(bundle.envelope_high[at]):g}",
        )


def _shapes(manifest: Manifest) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {}
    for place, (inputs, outputs) in enumerate(manifest.network.shapes):
        shapes[f"layer{place}_weights"] = (inputs, outputs)
        shapes[f"layer{place}_biases"] = (outputs,)
    return shapes | {name: (manifest.observation.size,) for name in _ENVELOPE}


def _action_schema(manifest: Manifest, where: str) -> ActionSchema:
    text = manifest.action
    for knob in text.knobs:
        if knob not in DEFAULT_KNOBS or knob not in text.reach:
            raise BundleError(
                where,
                key="action.knobs",
                value=knob,
                bound=f"one of {', '.join(DEFAULT_KNOBS)}, with a reach",
                remedy=did_you_mean(knob, DEFAULT_KNOBS),
            )
    schema = ActionSchema(names=tuple(text.names), knobs=tuple(text.knobs), reach=text.reach)
    if schema.digest != text.digest:
        raise BundleError(
            where,
            key="action.digest",
            value=text.digest,
            bound=f"{schema.digest}, as this version reads these actions",
            remedy="train again with this version",
        )
    return schema


def _nearest_bundle(folder: Path) -> str:
    try:
        names: Sequence[str] = [
            other.name for other in folder.parent.iterdir() if (other / MANIFEST_NAME).is_file()
        ]
    except OSError:
        names = []
    hint = did_you_mean(folder.name, names)
    return hint or "name the folder that trimtab train wrote"

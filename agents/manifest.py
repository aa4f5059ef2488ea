"""The text of a bundle, policy.json: its keys, read strictly and written canonically.

It knows no arrays: see `bundle`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from trimtab.engine_bridge.errors import BundleError, did_you_mean

FORMAT: Final = 1
MOST_LAYERS: Final = 8
MOST_WIDTH: Final = 4096
MOST_BYTES: Final = 1 << 20
"""Largest policy.json, bytes."""
_MOST_NAMES = 4096

Digest = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
Text = Annotated[str, Field(min_length=1, max_length=200)]
Width = Annotated[int, Field(ge=1, le=MOST_WIDTH)]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


class ObservationText(_Section):
    """What the policy sees."""

    digest: Digest
    """Of the observation's schema."""
    size: Width
    """Number of entries."""


class ActionText(_Section):
    """What the policy moves: the fields of `envs.action.ActionSchema`."""

    digest: Digest
    """Of the action's schema."""
    names: Annotated[list[Text], Field(min_length=1, max_length=_MOST_NAMES)]
    """One name an entry."""
    knobs: Annotated[list[Text], Field(min_length=1, max_length=64)]
    """The knobs that move."""
    reach: dict[Text, Annotated[float, Field(gt=0, le=10)]]
    """How far each goes."""


class NetworkText(_Section):
    """The form of the network; its numbers are in policy.npz."""

    activation: Literal["tanh"]
    """Between two layers."""
    shapes: Annotated[
        list[Annotated[list[Width], Field(min_length=2, max_length=2)]],
        Field(min_length=1, max_length=MOST_LAYERS),
    ]
    """Inputs and outputs of each layer."""


class PlanText(_Section):
    """The plan that the policy was trained under."""

    digest: Digest
    """Of the whole plan; another plan with the same tiers and pools may use the policy."""
    tiers: Annotated[list[Text], Field(min_length=1, max_length=64)]
    """Names of the tiers, in order."""
    pools: Annotated[list[Text], Field(min_length=1, max_length=64)]
    """Names of the pools, in order."""


class Manifest(_Section):
    """The whole of policy.json."""

    format: Literal[1]
    """Of the bundle."""
    digest: Digest
    """Of the bundle's content; `versions` is no part of it."""
    observation: ObservationText
    action: ActionText
    network: NetworkText
    plan: PlanText
    traces: Annotated[list[Digest], Field(max_length=10_000)]
    """Digests of the traces that it was trained on."""
    training: dict[str, Any]
    """How it was trained, for people and for training it again."""
    versions: dict[str, str]
    """What it was made with; of the machine, not of the content."""


def read_manifest(path: Path) -> Manifest:
    """Read policy.json.

    Raises:
        BundleError: the file is missing, too large, no JSON, of another format, or a key is wrong.
    """
    where = str(path)
    content = _object(where, read_bounded(path, MOST_BYTES))
    if content.get("format") != FORMAT or isinstance(content.get("format"), bool):
        raise BundleError(
            where,
            key="format",
            value=content.get("format"),
            bound=f"{FORMAT}",
            remedy="read it with the Trimtab that wrote it, or train again",
        )
    try:
        return Manifest.model_validate(content)
    except ValidationError as fault:
        raise _bundle_error(where, fault) from None


def canonical(content: Any) -> str:
    """JSON whose bytes depend on the content only.

    Raises:
        ValueError: a number is not finite.
        TypeError: something has no JSON form.
    """
    return json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False)


def read_bounded(path: Path, most_bytes: int) -> bytes:
    """A bundle's file, if it is not too large.

    Raises:
        BundleError: it is missing, cannot be read, or is too large.
    """
    try:
        with path.open("rb") as file:
            content = file.read(most_bytes + 1)
    except FileNotFoundError:
        remedy = "name the folder of a bundle: policy.json and policy.npz"
        raise BundleError(str(path), value="no such file", remedy=remedy) from None
    except OSError as fault:
        raise BundleError(str(path), value=fault.strerror, bound="readable") from None
    if len(content) > most_bytes:
        raise BundleError(
            str(path),
            key="size",
            value=f"{path.stat().st_size:,} bytes",
            bound=f"at most {most_bytes:,} bytes",
            remedy="this is no bundle of Trimtab",
        )
    return content


def _object(where: str, text: bytes) -> dict[str, Any]:
    try:
        content = json.loads(text.decode("utf-8"), parse_constant=_no_constant)
    except (ValueError, RecursionError) as fault:
        raise BundleError(
            where, value=str(fault), bound="JSON", remedy="write the bundle again"
        ) from None
    if not isinstance(content, dict):
        raise BundleError(where, value=content, bound="an object of keys and values")
    return content


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is no number of JSON")


def _bundle_error(where: str, fault: ValidationError) -> BundleError:
    """The first fault; a mistyped key before the key that is missing for it."""
    errors = sorted(
        fault.errors(include_url=False), key=lambda error: error["type"] != "extra_forbidden"
    )
    first = errors[0]
    path = tuple(str(part) for part in first["loc"])
    if first["type"] == "extra_forbidden":
        known = _keys(path[:-1])
        return BundleError(
            where,
            key=".".join(path),
            bound="a known key",
            remedy=did_you_mean(path[-1], known) or f"known keys: {', '.join(known)}",
        )
    if first["type"] == "missing":
        return BundleError(where, key=".".join(path), bound="given")
    return BundleError(
        where,
        key=".".join(path),
        value=first["input"],
        bound=first["msg"].removeprefix("Input should be ").removeprefix("Input should "),
        remedy="write the bundle again",
    )


def _keys(path: tuple[str, ...]) -> tuple[str, ...]:
    section: Any = Manifest
    for part in path:
        section = section.model_fields[part].annotation
    return tuple(section.model_fields)

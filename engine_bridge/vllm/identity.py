"""Whose a request is: from the API key, or from the labels of a trusted gateway.

It decides; `middleware` reads and writes the requests. What it was told comes in one environment
variable, because vLLM makes the middleware and passes it nothing.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from trimtab.engine_bridge.errors import InputError, PlanError, did_you_mean
from trimtab.engine_bridge.plan import Plan, load_plan
from trimtab.engine_bridge.plan.yaml_source import Source, read_source

IDENTITY: Final = "TRIMTAB_IDENTITY"
"""Environment variable with `IdentitySettings` as JSON."""
TENANT_ARG: Final = "trimtab_tenant"
"""Key of the tenant in a request's `vllm_xargs` and in its sampling parameters' `extra_args`."""
TIER_ARG: Final = "trimtab_tier"
"""Key of the tier there."""
SLICE_ARG: Final = "trimtab_slice"
"""Key there that says that a request is a slice of one: it only reads a prompt's beginning."""
ANONYMOUS: Final = "anonymous"
"""Tenant of requests that say nothing about themselves, or may not."""
LONGEST_TENANT: Final = 200

_SHA256: Final = re.compile(r"[0-9a-f]{64}")


class KeysError(InputError):
    """A keys file cannot be used."""


class UnknownKeyError(Exception):
    """The request has no API key, or one that nobody has."""


class LabelError(Exception):
    """A trusted gateway sent a label that the plan does not know; the text says which."""


@dataclass(frozen=True)
class Identity:
    """Tenant and tier of a request."""

    tenant: str
    tier: str


class IdentitySettings(BaseModel):
    """How the API server finds out whose a request is."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, use_attribute_docstrings=True
    )

    plan: str | None = None
    """A plan's file or shipped name; null: the shipped default."""
    keys: str | None = None
    """Path of the keys file; null: API keys are not looked at."""
    trust_labels: bool = False
    """Whether the headers `X-Trimtab-Tenant` and `X-Trimtab-Tier` are believed."""
    priority: bool = True
    """Whether to stamp the tier's order as vLLM's priority; vLLM refuses one under `fcfs`."""
    admission: str | None = None
    """Path of the admission file; null: nothing but identity is looked at."""
    engine: str | None = None
    """Engine whose step times judge long prompts; null: none. Of use with `admission` only."""
    control: str | None = None
    """Control socket that says how full the engine is, `PATH` or `tcp://host:port`; null: nobody
    does. Of use with `admission` only."""
    usage_always: bool = False
    """Whether the operator wants every stream to end with its usage. Likewise."""

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> Self:
        """The settings in `IDENTITY`; without it, nobody is known and nothing is believed.

        Raises:
            InputError: the variable does not hold such settings.
        """
        try:
            return cls.model_validate_json(environment.get(IDENTITY, "{}"))
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            key = ".".join(map(str, first["loc"]))
            raise InputError(IDENTITY, key=key, bound="as `trimtab serve` sets it") from None


class _Key(BaseModel):
    """One tenant's entry in a keys file."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    keys_sha256: Annotated[list[str], Field(min_length=1)]
    tier: str | None = None


class Identifier:
    """Tells whose a request is."""

    def __init__(self, settings: IdentitySettings, plan: Plan) -> None:
        """Read the keys file, if there is one.

        Raises:
            KeysError: it cannot be used; one line with file, line, key and remedy.
        """
        self._plan = plan
        self._trust_labels = settings.trust_labels
        self._keys = None if settings.keys is None else read_keys(Path(settings.keys), plan)
        self._nobody = Identity(ANONYMOUS, default_tier(plan))

    @classmethod
    def of(cls, settings: IdentitySettings) -> Self:
        """The identifier for these settings, with the plan that they name."""
        return cls(settings, load_plan(settings.plan))

    @property
    def asks_for_keys(self) -> bool:
        """Whether a request without a known key is refused."""
        return self._keys is not None

    @property
    def believes_labels(self) -> bool:
        """Whether a gateway's labels are believed."""
        return self._trust_labels and self._keys is None

    def identify(
        self, *, key: str | None = None, tenant: str | None = None, tier: str | None = None
    ) -> Identity:
        """Whose a request is.

        Args:
            key: Its API key.
            tenant: The label of that name. Read only if labels are trusted, like the next.
            tier: Likewise.

        Raises:
            UnknownKeyError: keys are asked for and this is none.
            LabelError: a trusted label is none of the plan's.
        """
        if self._keys is not None:
            return self._by_key(self._keys, key)
        if self.believes_labels:
            return self._by_labels(tenant, tier)
        return self._nobody

    def order(self, tier: str) -> int:
        """Place of a tier in the plan: vLLM's priority, where less is more urgent."""
        return self._plan.tier_index(tier)

    def _by_key(self, keys: Mapping[bytes, Identity], key: str | None) -> Identity:
        digest = hashlib.sha256((key or "").encode("utf-8", "surrogatepass")).digest()
        found = None
        # All of them are compared, whichever is right: the time tells nothing.
        for known, identity in keys.items():
            if hmac.compare_digest(known, digest):
                found = identity
        if found is None or not key:
            raise UnknownKeyError
        return found

    def _by_labels(self, tenant: str | None, tier: str | None) -> Identity:
        tenant = tenant or ANONYMOUS
        if len(tenant) > LONGEST_TENANT or not tenant.isprintable():
            raise LabelError(f"the tenant must be at most {LONGEST_TENANT} printable characters")
        tier = tier or _tier_of(tenant, self._plan)
        if tier not in self._plan.tiers:
            known = ", ".join(self._plan.tiers)
            raise LabelError(f"the tier must be one of {known}")
        return Identity(tenant, tier)


def default_tier(plan: Plan) -> str:
    """Tier of a request that nobody vouches for: the plan's default, else the lowest weight."""
    if plan.default_tier is not None:
        return plan.default_tier
    return min(reversed(plan.tiers), key=lambda name: plan.tiers[name].weight)


def read_keys(path: Path, plan: Plan) -> dict[bytes, Identity]:
    """Read a keys file: tenant to hashes of its keys and, where the plan has none, its tier.

    Returns:
        Identity by SHA-256 of the key.

    Raises:
        InputError: one line with file, line, key and remedy; it never shows what may be a key.
    """
    try:
        source = read_source(path)
    except PlanError as error:
        # The value stays out: it may be a key.
        remedy = "write one line a tenant, tenant: {tier: T0, keys_sha256: [...]}"
        raise KeysError(error.where, bound=error.bound, remedy=remedy) from None
    keys: dict[bytes, Identity] = {}
    for tenant, content in source.data.items():
        entry = _entry(source, tenant, content)
        identity = Identity(tenant, _key_tier(source, tenant, entry.tier, plan))
        for number, text in enumerate(entry.keys_sha256):
            digest = _digest(source, tenant, number, text)
            if digest in keys:
                other = keys[digest].tenant
                raise KeysError(
                    source.place((tenant,)),
                    key=f"{tenant}.keys_sha256.{number}",
                    bound="a key of one tenant alone",
                    remedy=f"{other} has it too",
                )
            keys[digest] = identity
    return keys


def _entry(source: Source, tenant: str, content: object) -> _Key:
    if not 1 <= len(tenant) <= LONGEST_TENANT or not tenant.isprintable():
        raise KeysError(
            source.place((tenant,)),
            key=tenant,
            bound=f"a tenant of 1 to {LONGEST_TENANT} printable characters",
        )
    try:
        return _Key.model_validate(content)
    except ValidationError as error:
        # A mistyped key is unknown, and the right one missing: the first says how to mend it.
        faults = error.errors(include_url=False)
        first = min(faults, key=lambda fault: fault["type"] != "extra_forbidden")
        loc = first["loc"]
        remedy = "write keys_sha256: [...] and, where the plan has none, tier"
        if first["type"] == "extra_forbidden":
            remedy = did_you_mean(loc[-1], _Key.model_fields) or remedy
        raise KeysError(
            source.place((tenant, *loc)),
            key=".".join(map(str, (tenant, *loc))),
            bound="a known key" if first["type"] == "extra_forbidden" else "a list of hashes",
            remedy=remedy,
        ) from None


def _digest(source: Source, tenant: str, number: int, text: str) -> bytes:
    if _SHA256.fullmatch(text) is None:
        # Whoever wrote the key itself must not find it in a log.
        raise KeysError(
            source.place((tenant, "keys_sha256")),
            key=f"{tenant}.keys_sha256.{number}",
            bound="the SHA-256 of a key, 64 digits of 0-9 a-f, not the key itself",
            remedy="make it with: printf %s KEY | sha256sum",
        )
    return bytes.fromhex(text)


def _key_tier(source: Source, tenant: str, tier: str | None, plan: Plan) -> str:
    planned = plan.tenants[tenant].tier if tenant in plan.tenants else None
    if tier is None:
        return planned or default_tier(plan)
    if tier not in plan.tiers:
        known = ", ".join(plan.tiers)
        place = source.place((tenant, "tier"))
        remedy = did_you_mean(tier, plan.tiers)
        raise KeysError(
            place, key=f"{tenant}.tier", value=tier, bound=f"one of {known}", remedy=remedy
        )
    if planned is not None and planned != tier:
        raise KeysError(
            source.place((tenant, "tier")),
            key=f"{tenant}.tier",
            value=tier,
            bound=f"{planned}, as the plan {plan.name} says",
            remedy="leave it out here",
        )
    return tier


def _tier_of(tenant: str, plan: Plan) -> str:
    return plan.tenants[tenant].tier if tenant in plan.tenants else default_tier(plan)

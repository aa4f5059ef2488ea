"""What each tier and tenant may ask for: the admission file, read and checked.

It counts nothing. docs/admission.md is for its users.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Final, Self
from urllib.parse import urlsplit

from pydantic import Field, field_validator, model_validator

from trimtab.engine_bridge.errors import InputError, did_you_mean
from trimtab.engine_bridge.plan import Plan
from trimtab.engine_bridge.plan.schema import TenantName
from trimtab.engine_bridge.plan.section import (
    LARGEST_COUNT,
    Count,
    Name,
    PositiveCount,
    PositiveFraction,
    PositiveMs,
    Section,
    fault,
)
from trimtab.engine_bridge.plan.settings_file import checked_settings, read_settings_source
from trimtab.engine_bridge.plan.yaml_source import Source

STORAGE: Final = "TRIMTAB_ADMISSION_STORAGE"
"""Environment variable with the storage's URL, which may hold a password; goes before the file."""
MEMORY: Final = "memory://"
_SCHEMES: Final = (
    "memory", "redis", "rediss", "redis+unix", "redis+sentinel", "redis+cluster",
    "valkey", "valkeys", "valkey+unix", "valkey+sentinel", "valkey+cluster",
)  # fmt: skip

_Seconds = Annotated[float, Field(gt=0, le=604_800)]


class AdmissionSettingsError(InputError):
    """The admission file is wrong."""


class Limits(Section):
    """What one tier or tenant may ask for; null: as much as it likes."""

    suspended: bool = False
    """Every request is answered 403."""
    requests_per_minute: PositiveCount | None = None
    """Requests in any 60 s. One that asks for several prompts or answers counts as so many."""
    requests_per_second: PositiveCount | None = None
    """Requests in any second, counted likewise. The quota of a minute alone lets a tenant send all
    of them in its first seconds, as fast as it can."""
    prompt_tokens_per_minute: PositiveCount | None = None
    """Tokens of prompts in any 60 s, cached ones too."""
    output_tokens_per_minute: PositiveCount | None = None
    """Tokens of answers in any 60 s. What a request may generate is reserved when it comes and
    what it has not generated is given back when it ends."""
    concurrent_requests: PositiveCount | None = None
    """Requests at once, counted as for `requests_per_minute`."""
    budget_per_day: Annotated[float, Field(gt=0, le=1e12)] | None = None
    """In any 24 hours: USD where the plan has a price for the tier, otherwise priced tokens (fresh
    prompt + 0.1 x cached prompt + 3 x output)."""
    max_prompt_tokens: PositiveCount | None = None
    """Longest prompt, tokens; above it 413."""
    max_prefill_ms: PositiveMs | None = None
    """Longest prefill by the engine's step times with nothing cached, milliseconds, with the time
    of its encoders for what is shown; above it 413.
    Left out: the E2E target, for a tier that has one and no TTFT target."""
    longest_output_tokens: Annotated[int, Field(ge=1, le=LARGEST_COUNT)] | None = None
    """Longest answer, tokens: a higher `max_tokens` is cut to it, a missing one filled in."""

    @model_validator(mode="after")
    def _agree(self) -> Self:
        longest, quota = self.longest_output_tokens, self.output_tokens_per_minute
        if longest is not None and quota is not None and longest > quota:
            raise fault(
                "longest_output_tokens",
                value=longest,
                bound=f"at most output_tokens_per_minute, {quota}",
            )
        return self


class Saturation(Section):
    """When an engine is full, and who is sent away then."""

    queue_length: PositiveCount | None = None
    """So many waiting requests, or more."""
    kv_use_fraction: PositiveFraction | None = None
    """So much of the KV cache in use by running requests, or more."""
    tiers: Annotated[list[Name], Field(min_length=1)] | None = None
    """Tiers that are answered 503 then; null: the plan's low ones."""
    retry_after_s: _Seconds = 5.0
    """When they are told to come again, seconds: nobody knows when an engine will have room."""
    stale_after_s: _Seconds = 30.0
    """An engine that has said nothing for so long counts as full, seconds."""


class TenantBreaker(Section):
    """When a tenant's requests fail so often that it is slowed, it alone."""

    failure_fraction: PositiveFraction = 0.5
    """So many of its last requests failed or timed out, or more ..."""
    of_last: Annotated[int, Field(ge=1, le=1000)] = 20
    """... of this many. Before it has made so many, nothing is judged."""
    slow_to_per_minute: Annotated[float, Field(gt=0, le=6000)] = 6.0
    """Requests a minute that it keeps, evenly spaced."""
    probe_after_s: _Seconds = 30.0
    """After so long one request decides, seconds: it ends well, and the tenant is as free as
    before; it fails, and the time begins anew."""


class Media(Section):
    """What images, sounds and videos cost, in prompt tokens; their bytes are no text."""

    image_tile_pixels: Annotated[int, Field(ge=1, le=65_536)] = 512
    """Side of the square tiles that an image is cut into, pixels."""
    tokens_per_tile: Count = 256
    """Tokens of a tile."""
    most_tiles: PositiveCount = 16
    """Most tiles of an image; taken where its size is not known, as behind a URL."""
    audio_tokens_per_s: Annotated[float, Field(ge=0, le=10_000)] = 25.0
    """Tokens of a second of sound."""
    most_audio_s: _Seconds = 600.0
    """Length taken where it is not known, seconds."""
    video_tokens: Count = 8192
    """Tokens of a video."""


class AdmissionSettings(Section):
    """The whole file."""

    tiers: dict[Name, Limits] = Field(default_factory=dict)
    """Limits of each tenant of a tier, by tier."""
    tenants: dict[TenantName, Limits] = Field(default_factory=dict)
    """Limits of single tenants: what is given here takes the place of the tier's, null too."""
    storage: str = MEMORY
    """Where quotas are counted: `memory://`, in each process alone, or a Redis that several share,
    `redis://host:port/0`. The environment's `TRIMTAB_ADMISSION_STORAGE` goes before it."""
    storage_time_out_s: Annotated[float, Field(gt=0, le=10)] = 0.25
    """Longest wait for a shared storage, seconds. One that is late or away is left alone for 5 s,
    and each process counts by itself meanwhile."""
    saturation: Saturation | None = None
    """null: an engine is never full."""
    tenant_breaker: TenantBreaker | None = TenantBreaker()
    """null: no tenant is slowed, however many of its requests fail."""
    media: Media = Media()
    """What images, sounds and videos cost."""
    template_tokens: Count = 64
    """What a model's chat template may add to a prompt beyond the request's own text, tokens."""
    longest_request_s: _Seconds = 3600.0
    """A request that has not ended after so long no longer counts as one at once, seconds."""

    @field_validator("storage")
    @classmethod
    def _known_storage(cls, value: str) -> str:
        return checked_storage(value)

    @property
    def storage_url(self) -> str:
        """The storage that holds: the environment's before the file's.

        Raises:
            AdmissionSettingsError: the environment names none that is known.
        """
        given = os.environ.get(STORAGE)
        if given is None:
            return self.storage
        if urlsplit(given).scheme not in _SCHEMES:
            # The value may hold a password.
            raise AdmissionSettingsError(STORAGE, bound=f"one of {', '.join(_SCHEMES)} with ://...")
        return given

    def limits_of(self, tenant: str, tier: str) -> Limits:
        """What a tenant may ask for: its tier's limits, with its own in their place."""
        base, own = self.tiers.get(tier), self.tenants.get(tenant)
        if base is None or own is None:
            return own or base or _NONE
        mixed = {name: getattr(own, name) for name in own.model_fields_set}
        return base.model_copy(update=mixed)


_NONE: Final = Limits()


def checked_storage(value: str) -> str:
    """The URL of a storage, if its scheme is known; a fault for a validator otherwise."""
    scheme = value.partition("://")[0]
    if "://" not in value or scheme not in _SCHEMES:
        raise fault(
            "",
            value=scheme,
            bound="memory:// or redis://host:port/0",
            remedy=did_you_mean(scheme, _SCHEMES),
        )
    return value


def load_admission(path: Path, plan: Plan) -> AdmissionSettings:
    """Read an admission file.

    Raises:
        AdmissionSettingsError: it is not there, not in order, or names a tier that the plan has
            not; one line with file, line, key and remedy.
    """
    source = read_settings_source(path, AdmissionSettingsError, page="docs/admission.md")
    settings = checked_settings(source.data, source, AdmissionSettings, AdmissionSettingsError)
    _check_tiers(settings, plan, source)
    return settings


def _check_tiers(settings: AdmissionSettings, plan: Plan, source: Source) -> None:
    named = [("tiers", name) for name in settings.tiers]
    for number, name in enumerate((settings.saturation and settings.saturation.tiers) or ()):
        named.append((f"saturation.tiers.{number}", name))
    for place, name in named:
        if name not in plan.tiers:
            key = f"{place}.{name}" if place == "tiers" else place
            raise AdmissionSettingsError(
                source.place(tuple(key.split("."))),
                key=key,
                value=name,
                bound=f"one of the plan's tiers {', '.join(plan.tiers)}",
                remedy=did_you_mean(name, plan.tiers),
            )

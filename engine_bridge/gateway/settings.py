"""What the gateway is told: where it listens, which engines there are, how patient it is.

One YAML file. It checks form and contradictions; whether an engine answers shows when it runs.
docs/gateway.md is for its users.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Final, Literal, Protocol, Self
from urllib.parse import urlsplit

from pydantic import Field, field_validator, model_validator

from trimtab.engine_bridge.errors import InputError, did_you_mean
from trimtab.engine_bridge.plan import Plan
from trimtab.engine_bridge.plan.section import Fraction, Name, PositiveCount, Section, Text, fault
from trimtab.engine_bridge.plan.settings_file import checked_settings, read_settings_source
from trimtab.engine_bridge.plan.yaml_source import Source

ENGINE_KEY: Final = "TRIMTAB_ENGINE_KEY"
"""Environment variable with the API key that the engines ask the gateway for."""

_File = Annotated[Path, Field(strict=False)]
_Seconds = Annotated[float, Field(gt=0, le=86_400)]
_Words = Annotated[list[str], Field(min_length=1)]


class GatewaySettingsError(InputError):
    """The gateway's settings are wrong."""


class EngineSettings(Section):
    """One engine: an API server with the fair scheduler, started with `--trust-labels`."""

    url: str
    """Where it serves, for instance `http://127.0.0.1:8000`."""
    models: _Words
    """Names of the models that it serves."""
    tiers: _Words | None = None
    """Tiers that it serves; null: all."""
    draft: Name | None = None
    """Label of its draft model; `drafts` sends tiers to it."""
    tenants: _Words | None = None
    """It serves these tenants alone, and they go nowhere else. null: it is shared."""
    reserve: bool = False
    """Whether it is kept for `reserve_tiers`, for when none of their other engines can be used."""
    capacity: Annotated[float, Field(gt=0, le=1000)] = 1.0
    """Its size over the other engines': so much more it gets."""
    metrics: str | None = None
    """URL of its metrics page; null: `/metrics` beside `url`."""
    step_times: str | None = None
    """Engine whose step times turn tokens into GPU-milliseconds in the accounts; null: none."""

    @field_validator("url", "metrics")
    @classmethod
    def _is_url(cls, value: str | None) -> str | None:
        return None if value is None else _url(value)

    @property
    def metrics_url(self) -> str:
        """Where its metrics page is."""
        return self.metrics or f"{self.url.rstrip('/')}/metrics"


class AffinitySettings(Section):
    """How strongly prompts with the same beginning keep to one engine."""

    prefix_bytes: Annotated[int, Field(ge=0, le=1 << 20)] = 2048
    """So much of a prompt's beginning counts; a conversation counts up to its first user message.
    0: the tenant alone counts."""
    most_over_mean: Annotated[float, Field(ge=1, le=100)] = 1.25
    """A request leaves its engine when this has more than so many times the mean load ..."""
    slack_requests: Annotated[int, Field(ge=0, le=10_000)] = 8
    """... and so many requests on top."""


class ProbeSettings(Section):
    """How the gateway finds out which engines can be used."""

    every_s: _Seconds = 2.0
    """Time between two looks at an engine's `/health`, seconds."""
    time_out_s: _Seconds = 2.0
    """Longest wait for the answer, seconds."""
    fail_after: PositiveCount = 3
    """So many looks in a row that fail, and the engine is out."""
    eject_after: PositiveCount = 2
    """So many requests in a row that find no engine there, and it is out."""
    eject_s: _Seconds = 2.0
    """Out for so long, seconds; twice as long each time that it fails again."""
    longest_eject_s: _Seconds = 60.0
    """But no longer than this, seconds."""
    back_after: PositiveCount = 3
    """So many good looks in a row bring it back where no request has tried it."""


class TimeOuts(Section):
    """How long the gateway waits, seconds."""

    head_s: _Seconds = 10.0
    """For a request's line and headers."""
    body_s: _Seconds = 60.0
    """For a request's body."""
    connect_s: _Seconds = 3.0
    """For a connection to an engine."""
    first_byte_s: _Seconds = 600.0
    """For an engine's first byte: the request may wait in its queue."""
    idle_s: _Seconds = 120.0
    """For an engine's next byte."""
    stalled_client_s: _Seconds = 60.0
    """For a client that reads nothing more."""
    keep_alive_s: _Seconds = 75.0
    """For a connection's next request."""
    wait_s: _Seconds = 30.0
    """For an engine to come back, where none can be used; all waits of a request together."""
    drain_s: _Seconds = 120.0
    """For open requests, once the gateway is told to stop."""


class Caps(Section):
    """How much the gateway takes at once."""

    body_mib: Annotated[int, Field(ge=1, le=1024)] = 64
    """Longest body of a request, MiB."""
    bodies_mib: Annotated[int, Field(ge=1, le=65_536)] = 1024
    """All bodies together, MiB; what comes on top is told to come again."""
    head_kib: Annotated[int, Field(ge=1, le=1024)] = 64
    """Longest request line and headers together, KiB."""
    connections: PositiveCount = 8192
    """Most connections of clients."""
    waiting: Annotated[int, Field(ge=0, le=100_000)] = 256
    """Most requests that wait for an engine to come back, for each tier."""
    attempts: Annotated[int, Field(ge=1, le=10)] = 3
    """Most engines that a request is sent to, one after the other."""


class TraceSettings(Section):
    """Where OpenTelemetry's spans go, of how many requests, and what they say."""

    endpoint: str
    """The collector's URL for OTLP over HTTP, for instance `http://127.0.0.1:4318`; a path that is
    left out is `/v1/traces`."""
    headers_file: _File | None = None
    """YAML file with headers for the collector, a name and a value a line; null: none. A bearer
    token may be in the environment variable `TRIMTAB_TRACES_TOKEN` instead."""
    sampled_fraction: Fraction = 0.01
    """Share of requests that are followed, drawn by chance. 0: none but those of `parent` below."""
    service_name: Annotated[Text, Field(min_length=1)] = "trimtab-gateway"
    """What the spans call the gateway."""
    client_context: Literal["link", "parent", "ignore"] = "link"
    """What a client's `traceparent` counts for. `link`: the trace is the gateway's own and names
    the client's span. `parent`: the client's trace goes on, and the client decides whether it is
    followed, so trust your clients. `ignore`: nothing."""
    tenants: Literal["none", "hashed", "named"] = "none"
    """Whether spans say whose the request was: not, by a part of the name's SHA-256, or by name."""
    time_out_s: _Seconds = 10.0
    """Longest wait for the collector, seconds; nothing but its own thread waits."""

    @field_validator("endpoint")
    @classmethod
    def _is_url(cls, value: str) -> str:
        return _url(value)

    @property
    def traces_url(self) -> str:
        """Where spans are posted to."""
        parts = urlsplit(self.endpoint)
        return self.endpoint if parts.path.strip("/") else f"{self.endpoint.rstrip('/')}/v1/traces"


class GatewaySettings(Section):
    """The whole file. Paths are relative to the folder that the gateway is started in."""

    listen: str = "127.0.0.1:8080"
    """`host:port` for clients. Port 0: any."""
    admin: str | None = "127.0.0.1:9465"
    """`host:port` of health, readiness and metrics; null: none."""
    plan: str = "default"
    """Plan file, or a shipped plan's name."""
    keys: _File | None = None
    """Keys file; null: every request is the tenant `anonymous` in the default tier."""
    admission: _File | None = None
    """File with quotas and limits; null: none."""
    usage_dir: _File | None = None
    """Folder for the accounts, a row a request; null: none."""
    engines: Annotated[dict[Name, EngineSettings], Field(min_length=1)]
    """The engines by name."""
    drafts: dict[Name, Name] = Field(default_factory=dict)
    """Tier to the label of the draft model that suits it, for instance `{T2: code}`."""
    reserve_tiers: list[Name] = Field(default_factory=list)
    """Tiers that may use reserve engines; empty: the plan's tier of the highest weight."""
    affinity: AffinitySettings = AffinitySettings()
    """How strongly prompts keep to one engine."""
    probes: ProbeSettings = ProbeSettings()
    """How engines are looked after."""
    time_outs: TimeOuts = TimeOuts()
    """How long the gateway waits."""
    caps: Caps = Caps()
    """How much it takes."""
    traces: TraceSettings | None = None
    """Spans of requests for OpenTelemetry; null: none."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        urls: dict[str, str] = {}
        for name, engine in self.engines.items():
            if engine.url in urls:
                raise fault(
                    f"engines.{name}.url",
                    value=engine.url,
                    bound=f"another one than that of engine {urls[engine.url]}",
                )
            urls[engine.url] = name
        if self.caps.bodies_mib < self.caps.body_mib:
            raise fault(
                "caps.bodies_mib",
                value=self.caps.bodies_mib,
                bound=f"at least caps.body_mib, {self.caps.body_mib}",
            )
        labels = {engine.draft for engine in self.engines.values() if engine.draft}
        for tier, label in self.drafts.items():
            if label not in labels:
                raise fault(
                    f"drafts.{tier}",
                    value=label,
                    bound="the draft of an engine",
                    remedy=did_you_mean(label, labels) or "give an engine this draft",
                )
        return self

    def check_tiers(self, plan: Plan, where: str) -> None:
        """Check that every tier named here is one of the plan's.

        Raises:
            GatewaySettingsError: one is not.
        """
        check_tiers(self, plan, where, GatewaySettingsError)


class _NamesTiers(Protocol):
    """What engines' settings say of tiers, a gateway's and a fleet's."""

    @property
    def drafts(self) -> Mapping[str, str]: ...

    @property
    def reserve_tiers(self) -> Sequence[str]: ...

    @property
    def engines(self) -> Mapping[str, _ServesTiers]: ...


class _ServesTiers(Protocol):
    @property
    def tiers(self) -> Sequence[str] | None: ...


def check_tiers(named: _NamesTiers, plan: Plan, where: str, error: type[InputError]) -> None:
    """Refuse tiers that a plan does not have.

    Args:
        named: Settings of engines.
        plan: The plan.
        where: The settings' file.
        error: What to raise, with the key and what was meant.
    """
    keys = [(f"drafts.{tier}", tier) for tier in named.drafts]
    keys += [("reserve_tiers", tier) for tier in named.reserve_tiers]
    for name, engine in named.engines.items():
        keys += [(f"engines.{name}.tiers", tier) for tier in engine.tiers or ()]
    for key, tier in keys:
        if tier not in plan.tiers:
            raise error(
                where,
                key=key,
                value=tier,
                bound=f"one of {', '.join(plan.tiers)}, the tiers of plan {plan.name}",
                remedy=did_you_mean(tier, plan.tiers),
            )


def load_settings(path: Path) -> GatewaySettings:
    """Read the gateway's settings.

    Raises:
        GatewaySettingsError: the file is not there or not in order; one line says what to change.
    """
    source = read_settings_source(path, GatewaySettingsError, page="docs/gateway.md")
    return checked_settings(source.data, source, GatewaySettings, GatewaySettingsError)


def settings_from(values: Mapping[str, object], *, where: str) -> GatewaySettings:
    """Make settings of values.

    Raises:
        GatewaySettingsError: they are not in order.
    """
    return checked_settings(values, Source(where, "{}"), GatewaySettings, GatewaySettingsError)


def _url(value: str) -> str:
    try:
        parts = urlsplit(value)
        right = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        right = right and parts.username is None and not parts.query and not parts.fragment
        # It goes into the request line and the header `host` as it is.
        right = right and value.isascii() and value.isprintable() and " " not in value
        (parts.hostname or "").encode("idna")
    except ValueError:
        right = False
    if not right:
        raise fault("", value=value, bound="a URL such as http://127.0.0.1:8000")
    return value

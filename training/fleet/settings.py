"""What a fleet is: its engines, how requests find them, what they share, what goes wrong.

One YAML file, in the words of the gateway's own settings where both have the same thing. It checks
form and contradictions; it runs nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Final, Self

from pydantic import Field, model_validator

from trimtab.engine_bridge.errors import InputError, did_you_mean
from trimtab.engine_bridge.gateway.routing import EngineFacts
from trimtab.engine_bridge.gateway.settings import check_tiers
from trimtab.engine_bridge.plan import Plan
from trimtab.engine_bridge.plan.section import Name, Section, Text, fault
from trimtab.engine_bridge.plan.settings_file import checked_settings, read_settings_source
from trimtab.engine_bridge.plan.yaml_source import Source

MODEL: Final = "model"
"""Every engine of a replayed fleet serves this one model: a trace names none."""
_Words = Annotated[list[str], Field(min_length=1)]
_Seconds = Annotated[float, Field(ge=0, le=1e7)]


class FleetSettingsError(InputError):
    """A fleet's settings are wrong."""


class Engine(Section):
    """One engine."""

    engine: Text
    """Its step times: the name of a shipped engine, or an engine file."""
    tiers: _Words | None = None
    """Tiers that it serves; null: all."""
    tenants: _Words | None = None
    """It serves these tenants alone, and they go nowhere else. null: it is shared."""
    draft: Name | None = None
    """Label of its draft model; `drafts` sends tiers to it."""
    reserve: bool = False
    """Whether it is kept for `reserve_tiers`, for when none of their other engines can be used."""
    warm: bool = True
    """Whether it runs from the beginning. A cold one is started when it is first needed, and costs
    nothing until then."""
    start_s: _Seconds = 180.0
    """Time from its start until it serves, its cache empty, seconds."""
    capacity: Annotated[float, Field(gt=0, le=1000)] = 1.0
    """Its size over the other engines': so much more it gets."""


class Routing(Section):
    """How strongly requests keep to an engine; as in the gateway."""

    affinity: bool = True
    """Whether conversations, and prompts with the same beginning, keep to one engine. Without, each
    request goes by load alone."""
    most_over_mean: Annotated[float, Field(ge=1, le=100)] = 1.25
    """A request leaves its engine when this has more than so many times the mean load ..."""
    slack_requests: Annotated[int, Field(ge=0, le=10_000)] = 8
    """... and so many requests on top."""
    prefix_tokens: Annotated[int, Field(ge=0, le=1 << 20)] = 512
    """So much of the beginning of a prompt without a session counts as its beginning."""


class Store(Section):
    """KV blocks that the engines share outside of their GPUs, as LMCache does."""

    gib: Annotated[float, Field(gt=0, le=1e6)]
    """Its size."""
    gib_per_s: Annotated[float, Field(gt=0, le=1e4)]
    """How fast an engine loads blocks from it."""
    latency_ms: Annotated[float, Field(ge=0, le=1e5)] = 5.0
    """Before the first block of a request comes."""
    least_tokens: Annotated[int, Field(ge=0, le=1 << 20)] = 256
    """A hit is loaded if it saves at least so many tokens more than the engine's own cache."""


class Failure(Section):
    """An engine ends without warning, and is started again."""

    engine: Name
    at_s: _Seconds
    """When, seconds from the start of the trace."""
    down_s: _Seconds = 0.0
    """How long until it is started again; then it takes its `start_s`."""


class Fleet(Section):
    """Engines behind one gateway."""

    name: Name
    """Short name, for tables."""
    engines: Annotated[dict[Name, Engine], Field(min_length=1, max_length=64)]
    """The engines by name."""
    routing: Routing = Routing()
    """How requests find them."""
    drafts: dict[Name, Name] = Field(default_factory=dict)
    """Tier to the label of the draft model that it should have."""
    reserve_tiers: list[Name] = Field(default_factory=list)
    """Tiers that may use the reserve; empty: the tier of the highest weight."""
    wait_s: _Seconds = 30.0
    """How long a request waits for an engine to come back; then it is refused."""
    store: Store | None = None
    """null: every engine has its own cache only."""
    failures: list[Failure] = Field(default_factory=list)
    """What goes wrong."""

    @model_validator(mode="after")
    def _agree(self) -> Self:
        if all(engine.reserve or not engine.warm for engine in self.engines.values()):
            raise fault(
                "engines",
                value="only reserve or cold engines",
                bound="at least one warm engine that is no reserve",
            )
        for number, failure in enumerate(self.failures):
            if failure.engine not in self.engines:
                raise fault(
                    f"failures.{number}.engine",
                    value=failure.engine,
                    bound=f"one of {', '.join(self.engines)}",
                    remedy=did_you_mean(failure.engine, self.engines),
                )
        labels = {engine.draft for engine in self.engines.values()}
        for tier, label in self.drafts.items():
            if label not in labels:
                raise fault(f"drafts.{tier}", value=label, bound="the draft of one of the engines")
        return self

    def check_tiers(self, plan: Plan, where: str) -> None:
        """Refuse tiers that the plan does not have.

        Raises:
            FleetSettingsError: with the key and what was meant.
        """
        check_tiers(self, plan, where, FleetSettingsError)

    def facts(self) -> list[EngineFacts]:
        """What the gateway's routing knows of the engines."""
        return [
            EngineFacts(
                name=name,
                models=frozenset({MODEL}),
                tiers=None if own.tiers is None else frozenset(own.tiers),
                tenants=None if own.tenants is None else frozenset(own.tenants),
                draft=own.draft,
                reserve=own.reserve,
                capacity=own.capacity,
            )
            for name, own in self.engines.items()
        ]


def load_fleet(path: Path) -> Fleet:
    """Read a fleet's file.

    Raises:
        FleetSettingsError: it is not there or not in order; one line says what to change.
    """
    source = read_settings_source(path, FleetSettingsError, page="docs/fleet.md")
    return checked_settings(source.data, source, Fleet, FleetSettingsError)


def fleet_from(values: Mapping[str, object], *, where: str) -> Fleet:
    """Make a fleet of values.

    Raises:
        FleetSettingsError: they are not in order.
    """
    return checked_settings(values, Source(where, "{}"), Fleet, FleetSettingsError)

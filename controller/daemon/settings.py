"""What the daemon is told: which engines, by which policy, how far it may go. One YAML file.

It checks form and contradictions; whether an engine is there shows when it runs. docs/run.md is for
its users.
"""

from __future__ import annotations

import dataclasses
import math
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Self, TypeVar, cast
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, field_validator, model_validator

from trimtab.agents.guard_settings import DEFAULT_REACH, GuardSettings
from trimtab.agents.registry import BUNDLE_PREFIX
from trimtab.agents.verdict import GuardMode
from trimtab.engine_bridge.errors import InputError, did_you_mean
from trimtab.engine_bridge.plan.section import Name, PositiveCount, Section, fault
from trimtab.engine_bridge.plan.settings_file import checked_settings, read_settings_source
from trimtab.engine_bridge.plan.yaml_source import Source

POLICIES: Final = ("static", "reactive", "learned")
"""Policies by name; `bundle:FOLDER` is one too."""
MODEL_PREFIX: Final = "models:"
_MOST_OF_GUARD: Final = {
    "canary_fraction": 1.0,
    "hold_after_intervals": 100.0,
    "static_after_intervals": 100.0,
}
"""Where a setting of the guard ends: more would make canary mode another name of active, and keep
an allocation for which there are no figures any more."""
_LEAST_OF_GUARD: Final = {"novel_intervals": 1, "novel_window": 1}
"""Where one begins: with less the envelope would be off, or always be left."""
_MOST_WHOLE: Final = 1_000_000
_Given = TypeVar("_Given", str, Path)
_Seconds = Annotated[float, Field(gt=0, le=86_400)]
_StartMode = Literal["static", "shadow", "canary", "active"]


class SettingsError(InputError):
    """The daemon's settings are wrong."""


def _path(value: _Given) -> _Given:
    """What may name a file: no name is empty or holds a NUL."""
    text = str(value)
    if not text or "\0" in text:
        raise fault("", value=text, bound="a path")
    return value


_Folder = Annotated[Path, Field(strict=False), AfterValidator(_path)]
_Place = Annotated[str, AfterValidator(_path)]


class PrometheusSettings(Section):
    """A Prometheus that scrapes engines."""

    url: str
    """Its address, for instance `http://127.0.0.1:9090`."""
    match: dict[str, str] = Field(default_factory=dict)
    """Labels that pick the engine's series out, for instance `{job: vllm, instance: "a:8000"}`."""
    token_file: _Folder | None = None
    """File with a bearer token; none: no token."""
    timeout_s: _Seconds = 1.0
    """Longest wait for its answer, seconds."""
    lookback_s: _Seconds = 30.0
    """How old a sample may be to count as there, seconds. Its age goes into the telemetry's."""

    @field_validator("url")
    @classmethod
    def _is_url(cls, value: str) -> str:
        return _url("url", value)


class ProfileSettings(Section):
    """When a sample of the traffic is taken and looked at."""

    enabled: bool = True
    """Whether one is ever taken. Needs the engine's `traffic_log`."""
    baseline_factor: Annotated[float, Field(gt=1)] = 3.0
    """P99 of the time to first token above so many times its usual value begins one."""
    for_s: _Seconds = 30.0
    """It must stay above for so long, seconds."""
    sample_s: _Seconds = 60.0
    """How long the traffic is sampled, seconds."""
    at_most_every_s: _Seconds = 3600.0
    """Least time between two samples, seconds."""


class AuditSettings(Section):
    """The record of every decision, one folder an engine under `state_dir`."""

    enabled: bool = True
    """Whether decisions are recorded."""
    most_mib: PositiveCount = 64
    """Size at which a file is closed and the next one begun, MiB."""
    most_files: PositiveCount = 16
    """Files kept for each engine; the oldest goes."""


class EngineSettings(Section):
    """One engine."""

    control: _Place
    """Its control socket: a path, or `tcp://host:port` with TRIMTAB_CONTROL_TOKEN set."""
    plan: _Place = "default"
    """Plan file, or a shipped plan's name. It must be the plan that the engine runs."""
    metrics: str | None = None
    """URL of its /metrics, to read it directly."""
    prometheus: PrometheusSettings | None = None
    """The Prometheus that scrapes it, instead of `metrics`; none: the one for all."""
    rank: Annotated[int, Field(ge=0, le=4095)] = 0
    """Its data-parallel rank: the label `engine` of its metrics."""
    traffic_log: _Folder | None = None
    """Folder of its log of requests, where the daemon can read it; none: no profiles."""
    policy: str | None = None
    """As `policy` for all."""
    mode: _StartMode | None = None
    """As `mode` for all."""

    @field_validator("metrics")
    @classmethod
    def _is_url(cls, value: str | None) -> str | None:
        return None if value is None else _url("metrics", value)

    @field_validator("policy")
    @classmethod
    def _is_policy(cls, value: str | None) -> str | None:
        return None if value is None else _policy(value)

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if self.metrics is not None and self.prometheus is not None:
            raise fault(
                "metrics",
                value=self.metrics,
                bound="left out where prometheus is given",
                remedy="keep one of the two",
            )
        return self


class DaemonSettings(Section):
    """The whole file. Paths are relative to the folder that the daemon is started in."""

    listen: str | None = "127.0.0.1:9464"
    """`host:port` of dashboard, metrics and health; null: none. Port 0: any."""
    hosts: list[str] = Field(default_factory=list)
    """Names under which browsers reach it, beside localhost and addresses."""
    state_dir: _Folder = Path("state")
    """Folder for audit, profiles and the operator's token; made if it is missing."""
    prometheus: PrometheusSettings | None = None
    """Where the figures of engines come from that name neither `metrics` nor a Prometheus."""
    policy: str = "learned"
    """`static`, `reactive`, `learned`, or `bundle:FOLDER` for a folder that is watched."""
    mode: _StartMode = "shadow"
    """What the policy may do at the start: static, shadow, canary or active."""
    guard: dict[str, Any] = Field(default_factory=dict)
    """Settings of the guard by name (docs/guard.md), for instance `{probation_s: 120}`."""
    profile: ProfileSettings = ProfileSettings()
    """When a sample of the traffic is taken."""
    audit: AuditSettings = AuditSettings()
    """The record of decisions."""
    engines: Annotated[dict[Name, EngineSettings], Field(min_length=1)]
    """The engines by name; the name is a label of metrics and a folder."""

    @field_validator("policy")
    @classmethod
    def _is_policy(cls, value: str) -> str:
        return _policy(value)

    @field_validator("guard")
    @classmethod
    def _are_guard_settings(cls, value: dict[str, Any]) -> dict[str, Any]:
        known = {field.name: field for field in dataclasses.fields(GuardSettings)}
        for key, given in value.items():
            if key not in known:
                raise fault(
                    key, value=given, bound="a setting of the guard", remedy=_known(key, known)
                )
            if key == "reach":
                _check_reach(given)
            else:
                _check_number(key, given, whole=known[key].type == "int")
        settings = GuardSettings(**value)
        if settings.novel_window < settings.novel_intervals:
            raise fault(
                "novel_window",
                value=settings.novel_window,
                bound=f"at least novel_intervals, {settings.novel_intervals}",
                remedy="novel_fraction: 1 switches the envelope off",
            )
        return value

    @model_validator(mode="after")
    def _engines_differ(self) -> Self:
        sockets: dict[str, str] = {}
        for name, engine in self.engines.items():
            if engine.metrics is None and engine.prometheus is None and self.prometheus is None:
                raise fault(
                    f"engines.{name}.metrics",
                    value=None,
                    bound="the URL of the engine's /metrics",
                    remedy="or name a prometheus, for it or for all",
                )
            place = os.path.normpath(engine.control.removeprefix("unix:"))
            if place in sockets:
                raise fault(
                    f"engines.{name}.control",
                    value=engine.control,
                    bound=f"another one than that of engine {sockets[place]}",
                )
            sockets[place] = name
        return self

    @property
    def guard_settings(self) -> GuardSettings:
        """The guard's settings, with the defaults for what is not given."""
        return GuardSettings(**self.guard)

    def policy_of(self, engine: str) -> str:
        """The policy of an engine by name."""
        return self.engines[engine].policy or self.policy

    def mode_of(self, engine: str) -> GuardMode:
        """The mode that an engine's guard begins in."""
        return GuardMode(self.engines[engine].mode or self.mode)

    def prometheus_of(self, engine: str) -> PrometheusSettings | None:
        """The Prometheus that an engine's figures come from; None: it is read directly."""
        own = self.engines[engine]
        return None if own.metrics is not None else own.prometheus or self.prometheus


def load_settings(path: Path) -> DaemonSettings:
    """Read the daemon's settings.

    Raises:
        SettingsError: the file is not there or not in order; one line that says what to change.
    """
    source = read_settings_source(path, SettingsError, page="docs/run.md")
    return checked_settings(source.data, source, DaemonSettings, SettingsError)


def settings_from(values: Mapping[str, object], *, where: str) -> DaemonSettings:
    """Make settings of values, for instance of a command line's flags.

    Raises:
        SettingsError: they are not in order.
    """
    return checked_settings(values, Source(where, "{}"), DaemonSettings, SettingsError)


def _policy(name: str) -> str:
    if name in POLICIES or (name.startswith(BUNDLE_PREFIX) and name != BUNDLE_PREFIX):
        return _path(name)
    remedy = did_you_mean(name.partition(":")[0], (*POLICIES, BUNDLE_PREFIX.removesuffix(":")))
    if name.startswith(MODEL_PREFIX):
        remedy = (
            f"trimtab pull {name} --into DIR --every 60 beside it, and policy {BUNDLE_PREFIX}DIR"
        )
    raise fault(
        "", value=name, bound=f"one of {', '.join(POLICIES)}, or {BUNDLE_PREFIX}FOLDER",
        remedy=remedy,
    )  # fmt: skip


def _url(key: str, value: str) -> str:
    try:
        parts = urlsplit(value)
        right = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        right = False
    if not right:
        raise fault("", value=value, bound="a URL such as http://127.0.0.1:8000/metrics")
    return value


def _check_reach(given: object) -> None:
    if not isinstance(given, dict):
        raise fault("reach", value=given, bound="a mapping of knobs to numbers")
    for knob, reach in given.items():
        if knob not in DEFAULT_REACH:
            raise fault(
                f"reach.{knob}",
                value=reach,
                bound="a knob with a reach",
                remedy=_known(knob, DEFAULT_REACH),
            )
        _check_number(f"reach.{knob}", reach, whole=False)


def _check_number(key: str, given: object, *, whole: bool) -> None:
    number = isinstance(given, int | float) and not isinstance(given, bool)
    right = number and (isinstance(given, int) or not whole)
    least = _LEAST_OF_GUARD.get(key, 0)
    if not right or not least <= cast(float, given) < math.inf:
        bound = f"a {'whole ' if whole else ''}number, at least {least}"
        raise fault(key, value=given, bound=bound)
    most = _MOST_WHOLE if whole else _MOST_OF_GUARD.get(key, sys.float_info.max)
    if cast(float, given) > most:
        raise fault(key, value=given, bound=f"at most {most:g}")


def _known(name: str, known: Mapping[str, object]) -> str:
    return did_you_mean(name, known) or f"known are {', '.join(known)}"

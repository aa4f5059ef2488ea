"""What the plug-in is told at the engine's start, checked.

vLLM hands it over as `--additional-config '{"trimtab": {...}}'`, so it reaches every process of the
server. It holds no secret: those come from the environment alone (`CONTROL_TOKEN`, `SALT_SECRET`),
because command lines and configurations are shown in process lists and logs.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Final, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from trimtab.engine_bridge.errors import InputError, did_you_mean

SECTION: Final = "trimtab"
"""Key of the settings inside `--additional-config`."""
WHERE: Final = f"--additional-config {SECTION}"
"""Where a fault lies, for its message."""
CONTROL_TOKEN: Final = "TRIMTAB_CONTROL_TOKEN"
"""Environment variable with the token of the control socket over TCP."""
SALT_SECRET: Final = "TRIMTAB_SALT_SECRET"
"""Environment variable with the secret that cache salts are derived from."""

DEFAULT_ENGINE: Final = "h100:llama-3.1-70b-tp8"
_HOST_PORT: Final = re.compile(r"(?:\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+):(\d{1,5})")
_LARGEST_PORT: Final = 65535
_LONGEST_PATH: Final = 4096

Path = Annotated[str, Field(min_length=1, max_length=_LONGEST_PATH)]


class SettingsError(InputError):
    """The plug-in's settings cannot be used."""


class PluginSettings(BaseModel):
    """The plug-in's settings: immutable, no unknown keys, no silent conversions."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        strict=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
    )

    plan: Path | None = None
    """A plan's file, or the name of a shipped one; null: the shipped default."""
    engine: Path = DEFAULT_ENGINE
    """Whose step-time model counts service (and times the emulated steps): a shipped engine's name
    or the path of an engine file."""
    emulate: bool = False
    """Whether `executor.EmulatedExecutor` stands in for the GPUs."""
    time_scale: Annotated[float, Field(ge=0, le=1000)] = 1.0
    """Length of an emulated step over that of the model; 0: steps take no time."""
    control_socket: Path | None = None
    """Path of the control socket (unix); null: none."""
    control_tcp: str | None = None
    """`host:port` of the control socket over TCP; null: none. Needs `CONTROL_TOKEN`."""
    step_log_dir: Path | None = None
    """Folder for the log of steps; null: none."""
    traffic_log_dir: Path | None = None
    """Folder for the log of requests; null: none."""
    interval_s: Annotated[float, Field(ge=0.1, le=3600)] | None = None
    """Telemetry interval, seconds; null: the plan's `controller.interval_s`."""

    @field_validator("control_tcp")
    @classmethod
    def _is_host_and_port(cls, value: str | None) -> str | None:
        if value is not None:
            found = _HOST_PORT.fullmatch(value)
            if found is None or int(found[1]) > _LARGEST_PORT:
                raise ValueError(f"host:port with a port from 0 to {_LARGEST_PORT}")
        return value

    @classmethod
    def of(cls, additional_config: object) -> Self:
        """The settings inside vLLM's `additional_config`; without any, the defaults.

        Args:
            additional_config: `vllm_config.additional_config`; it may hold other plug-ins' keys.

        Raises:
            SettingsError: one line with the key, the value, the bound and the remedy.
        """
        given = additional_config.get(SECTION) if isinstance(additional_config, Mapping) else None
        if given is None:
            return cls()
        if not isinstance(given, Mapping):
            raise SettingsError(WHERE, value=given, bound="a mapping of keys to values")
        try:
            # As JSON does, not Python: `1` is good enough for a number with a fraction.
            return cls.model_validate(dict(given))
        except ValidationError as error:
            raise _refusal(error, tuple(cls.model_fields)) from None

    def as_additional_config(self) -> dict[str, Any]:
        """The value for `--additional-config` that `of` reads back: what was set, no defaults."""
        return {SECTION: self.model_dump(mode="json", exclude_unset=True)}


def _refusal(error: ValidationError, known: tuple[str, ...]) -> SettingsError:
    # A mistyped key explains more than the value of another one.
    faults = sorted(error.errors(include_url=False), key=lambda e: e["type"] != "extra_forbidden")
    first = faults[0]
    key = ".".join(str(part) for part in first["loc"])
    if first["type"] == "extra_forbidden":
        remedy = did_you_mean(key, known) or f"known keys: {', '.join(known)}"
        return SettingsError(WHERE, key=key, bound="a known key", remedy=remedy)
    bound = first["msg"].removeprefix("Value error, ").removeprefix("Input should be ")
    return SettingsError(WHERE, key=key, value=first["input"], bound=bound)

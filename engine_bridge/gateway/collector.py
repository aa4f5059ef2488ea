"""What is needed to send spans to a collector: the extra, and the headers it asks for.

It sends nothing and imports nothing of OpenTelemetry.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from trimtab.engine_bridge.errors import InputError, PlanError
from trimtab.engine_bridge.gateway.settings import GatewaySettingsError, TraceSettings
from trimtab.engine_bridge.plan.yaml_source import read_source

TOKEN: Final = "TRIMTAB_TRACES_TOKEN"
"""Environment variable with the bearer token that the collector asks for."""
_NEEDED: Final = ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http")
_HEADER: Final = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+")
_VALUE: Final = re.compile(r"[\x21-\x7e]([\x20-\x7e]*[\x21-\x7e])?")


def collector_headers(
    settings: TraceSettings, where: str, environment: Mapping[str, str] = os.environ
) -> dict[str, str]:
    """Headers for the collector.

    Args:
        settings: Which file they are in.
        where: The file with the settings, for errors.
        environment: Where the token is, if there is one.

    Raises:
        InputError: the extra is not installed, or the file or the token is not in order. No value
            of a header is shown.
    """
    if not all(map(_is_installed, _NEEDED)):
        raise GatewaySettingsError(
            where,
            key="traces",
            bound="left out where OpenTelemetry is not installed",
            remedy="install the extra: pip install 'trimtab[otel]'",
        )
    found = {} if settings.headers_file is None else _from_file(settings.headers_file)
    token = environment.get(TOKEN)
    if token is not None:
        if not _VALUE.fullmatch(token) or " " in token:
            raise InputError(TOKEN, bound="printable ASCII characters without spaces")
        found["authorization"] = f"Bearer {token}"
    return found


def _from_file(path: Path) -> dict[str, str]:
    try:
        source = read_source(path)
    except PlanError as error:
        remedy = "write a name and a value a line" if "plan" in error.remedy else error.remedy
        raise GatewaySettingsError(error.where, bound=error.bound, remedy=remedy) from None
    for name, value in source.data.items():
        if not isinstance(name, str) or not _HEADER.fullmatch(name):
            raise GatewaySettingsError(str(path), key=str(name), bound="the name of a header")
        if not isinstance(value, str) or not _VALUE.fullmatch(value):
            raise GatewaySettingsError(
                source.place((name,)),
                key=name,
                bound="text of printable ASCII characters",
                remedy="put it in quotes",
            )
    return {name.lower(): value for name, value in source.data.items()}


def _is_installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # of a package above it
        return False

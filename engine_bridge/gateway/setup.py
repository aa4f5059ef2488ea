"""What one version of the settings makes: plan, keys, engines, admission. A reload makes another.

It starts nothing and listens nowhere.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from trimtab.engine_bridge.admission.core import Admission
from trimtab.engine_bridge.admission.settings import AdmissionSettings, load_admission
from trimtab.engine_bridge.engine_spec import EngineSpec, get_engine_spec
from trimtab.engine_bridge.errors import InputError
from trimtab.engine_bridge.gateway.collector import collector_headers
from trimtab.engine_bridge.gateway.fleet import Fleet
from trimtab.engine_bridge.gateway.settings import ENGINE_KEY, GatewaySettings, load_settings
from trimtab.engine_bridge.gateway.tracing import Tracer
from trimtab.engine_bridge.plan import Plan, load_plan
from trimtab.engine_bridge.vllm.identity import Identifier, IdentitySettings, read_keys

if TYPE_CHECKING:
    from trimtab.engine_bridge.gateway.accounts import Accounts
    from trimtab.engine_bridge.gateway.span_export import SpanExport


@dataclass
class Files:
    """Everything that the settings name, read and checked."""

    settings: GatewaySettings
    plan: Plan
    identifier: Identifier
    admission: AdmissionSettings | None
    specs: Mapping[str, EngineSpec]
    """Step times by engine; only engines that have some."""
    collector_headers: Mapping[str, str] | None
    """Headers for the collector of traces; None: there is none."""


@dataclass
class Tracing:
    """What follows requests, and what sends the spans of them."""

    tracer: Tracer
    export: SpanExport


@dataclass
class Setup:
    """What requests are served with; meets `proxy.Setup`."""

    settings: GatewaySettings
    identifier: Identifier
    fleet: Fleet
    admission: Admission | None
    slice_tokens: Mapping[str, int]
    """Length of a long prompt's slices by tier; tiers without are left out."""


def read_files(path: Path) -> Files:
    """Read the settings and what they name; call it anywhere.

    Raises:
        InputError: something is not in order; one line says what.
    """
    settings = load_settings(path)
    plan = load_plan(settings.plan)
    settings.check_tiers(plan, str(path))
    if settings.keys is not None:
        _check_tenants(settings.keys, plan)
    identity = IdentitySettings(
        plan=settings.plan, keys=None if settings.keys is None else str(settings.keys)
    )
    specs = {
        name: get_engine_spec(engine.step_times)
        for name, engine in settings.engines.items()
        if engine.step_times is not None
    }
    limits = None if settings.admission is None else load_admission(settings.admission, plan)
    headers = None if settings.traces is None else collector_headers(settings.traces, str(path))
    return Files(settings, plan, Identifier(identity, plan), limits, specs, headers)


def make_fleet(files: Files, *, before: Fleet | None, monotonic_s: Callable[[], float]) -> Fleet:
    """The engines; call it inside the event loop."""
    return Fleet(files.settings, files.plan, before=before, monotonic_s=monotonic_s)


def slice_tokens(plan: Plan) -> Mapping[str, int]:
    """The plan's `slice_tokens`, of the tiers that have it."""
    tiers = plan.tiers.items()
    return {name: tier.slice_tokens for name, tier in tiers if tier.slice_tokens is not None}


def make_accounts(files: Files) -> Accounts | None:
    """The accounts, if the settings want them.

    Raises:
        LogFolderError: their folder cannot be written to.
    """
    if files.settings.usage_dir is None:
        return None
    from trimtab.engine_bridge.gateway.accounts import Accounts

    return Accounts(files.settings.usage_dir, files.specs)


def make_tracing(files: Files) -> Tracing | None:
    """What follows requests, if the settings want it; its thread is not started."""
    settings = files.settings.traces
    if settings is None or files.collector_headers is None:
        return None
    from trimtab.engine_bridge.gateway.span_export import SpanExport

    export = SpanExport.of(settings, files.collector_headers)
    tracer = Tracer(
        settings,
        export.keep,
        generator=random.Random(),
        monotonic_ns=time.perf_counter_ns,
        wall_ns=time.time_ns,
    )
    return Tracing(tracer, export)


def engine_key(environment: Mapping[str, str] = os.environ) -> str | None:
    """The API key that engines ask the gateway for; None: they ask for none.

    Raises:
        InputError: it cannot stand in a header.
    """
    key = environment.get(ENGINE_KEY)
    if key is None:
        return None
    if not key or not key.isascii() or not key.isprintable() or " " in key:
        raise InputError(ENGINE_KEY, bound="printable ASCII characters without spaces")
    return key


def _check_tenants(path: Path, plan: Plan) -> None:
    """Tenants go to engines in a header, which holds Latin-1."""
    for identity in read_keys(path, plan).values():
        try:
            identity.tenant.encode("latin-1")
        except UnicodeEncodeError:
            raise InputError(
                str(path),
                key=identity.tenant,
                bound="a name in Latin letters, because it goes to engines in a header",
            ) from None

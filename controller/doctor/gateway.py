"""Looks at a gateway's settings and at what it needs: engines, their models, the books of quotas.

It asks what costs nothing: `/health`, `/v1/models`, a metrics page, Redis's PING.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from trimtab.controller.doctor.finding import ODD_ANSWER, Finding, Verdict, fault_of
from trimtab.engine_bridge.errors import TrimtabError
from trimtab.engine_bridge.gateway.settings import ENGINE_KEY, EngineSettings, GatewaySettings
from trimtab.engine_bridge.gateway.setup import Files, read_files
from trimtab.engine_bridge.live import http_get
from trimtab.engine_bridge.live.snapshot import TelemetryUnavailableError

AREA: Final = "gateway"
_SERIES: Final = b"trimtab_"
_OK: Final = 200


def look(config: Path, *, timeout_s: float) -> Iterator[Finding]:
    """Everything about a gateway.

    Args:
        config: Its settings file.
        timeout_s: Longest wait for each answer, seconds.
    """
    try:
        files = read_files(config)
    except TrimtabError as error:
        yield fault_of(AREA, "settings", error)
        return
    settings = files.settings
    count = len(settings.engines)
    yield Finding(
        area=AREA,
        check="settings",
        verdict=Verdict.OK,
        found=f"{count} engine{'s' * (count > 1)}, plan {files.plan.name}: all in order",
    )
    yield from _doors(settings)
    yield from _quotas(files, timeout_s)
    for name, engine in settings.engines.items():
        yield from _engine(f"gateway's engine {name}", engine, files, timeout_s)


def _doors(settings: GatewaySettings) -> Iterator[Finding]:
    if settings.keys is None:
        yield Finding(
            area=AREA,
            check="keys",
            verdict=Verdict.WARNING,
            found="none: every request is the tenant anonymous",
            remedy="give a keys file (docs/gateway.md) before tenants come in",
        )
    if settings.usage_dir is None:
        yield Finding(
            area=AREA,
            check="accounts",
            verdict=Verdict.NOTE,
            found="none are kept: trimtab usage will have nothing to tell",
            remedy="set usage_dir, where you bill or want to know who sent what",
        )


def _quotas(files: Files, timeout_s: float) -> Iterator[Finding]:
    if files.admission is None:
        yield Finding(
            area=AREA,
            check="quotas",
            verdict=Verdict.NOTE,
            found="no admission file: no quotas and no limit on a prompt's length",
            remedy="see docs/admission.md",
        )
        return
    storage = files.admission.storage_url
    where = storage.split("://")[0]
    if where == "memory":
        yield Finding(
            area=AREA,
            check="quotas",
            verdict=Verdict.NOTE,
            found="counted in this process: two gateways would let twice as much through",
            remedy="give admission a storage in Redis where there are several",
        )
        return
    try:
        good = _answers(storage, timeout_s)
    except Exception as error:  # whatever the client of the storage raises, it cannot be used
        yield Finding(
            area=AREA,
            check="quotas",
            verdict=Verdict.FAULT,
            found=f"the {where} storage cannot be used: {type(error).__name__}",
            remedy="see that it runs; until then each gateway counts by itself",
        )
        return
    yield Finding(
        area=AREA,
        check="quotas",
        verdict=Verdict.OK if good else Verdict.FAULT,
        found=f"the {where} storage {'answers' if good else 'does not answer'}",
        remedy="" if good else "see that it runs; until then each gateway counts by itself",
    )


def _answers(storage: str, timeout_s: float) -> bool:
    """Asked once: the client's own time-outs and retries would hold the report up."""
    from limits.storage import storage_from_string
    from redis.backoff import NoBackoff
    from redis.retry import Retry

    options: dict[str, Any] = {"socket_timeout": timeout_s, "socket_connect_timeout": timeout_s}
    if "+cluster" not in storage:
        options["retry"] = Retry(NoBackoff(), 0)
    return bool(storage_from_string(storage, **options).check())


def _engine(area: str, engine: EngineSettings, files: Files, timeout_s: float) -> Iterator[Finding]:
    key = os.environ.get(ENGINE_KEY)
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    base = engine.url.rstrip("/")
    try:
        status, _, _ = http_get.get(f"{base}/health", headers=headers, timeout_s=timeout_s)
        status_models, _, body = http_get.get(
            f"{base}/v1/models", headers=headers, timeout_s=timeout_s
        )
    except TelemetryUnavailableError as error:
        yield fault_of(area, "answers", error)
        return
    yield Finding(
        area=area,
        check="health",
        verdict=Verdict.OK if status == _OK else Verdict.FAULT,
        found=f"{base} answers with {status}",
        remedy="" if status == _OK else "look at the engine's log",
    )
    yield _models(area, engine, status_models, body)
    yield _page(area, engine, headers, timeout_s)


def _models(area: str, engine: EngineSettings, status: int, body: bytes) -> Finding:
    check = "models"
    if status != _OK:
        return Finding(
            area=area,
            check=check,
            verdict=Verdict.FAULT,
            found=f"/v1/models answers with {status}",
            remedy=f"set {ENGINE_KEY} to the engine's API key" if status in (401, 403) else "",
        )
    try:
        served = sorted(str(one["id"]) for one in json.loads(body)["data"])
    except ODD_ANSWER as error:
        odd = f"{type(error).__name__}: {error}"
        return Finding(
            area=area, check=check, verdict=Verdict.FAULT, found=f"no list of models: {odd}"[:200]
        )
    missing = [name for name in engine.models if name not in served]
    return Finding(
        area=area,
        check=check,
        verdict=Verdict.FAULT if missing else Verdict.OK,
        found=f"serves {', '.join(served)}" + (f", not {', '.join(missing)}" if missing else ""),
        remedy="mend models, or start the engine with --served-model-name" if missing else "",
    )


def _page(area: str, engine: EngineSettings, headers: dict[str, str], timeout_s: float) -> Finding:
    check = "scheduler"
    try:
        status, _, body = http_get.get(engine.metrics_url, headers=headers, timeout_s=timeout_s)
    except TelemetryUnavailableError as error:
        return fault_of(area, check, error)
    if status == _OK and _SERIES in body:
        return Finding(area=area, check=check, verdict=Verdict.OK, found="Trimtab's")
    return Finding(
        area=area,
        check=check,
        verdict=Verdict.WARNING,
        found="its metrics have no series of Trimtab's: tiers share it as vLLM orders them",
        remedy="start it with trimtab serve",
    )

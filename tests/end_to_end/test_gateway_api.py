"""The gateway against its own description: by comparison, and by Schemathesis in all its phases."""

from __future__ import annotations

import hashlib
import importlib.util
import inspect
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from types import ModuleType
from typing import Any, Final

import httpx
import pytest
import yaml

from tests.end_to_end.gateway_process import (
    EngineProcess,
    GatewayProcess,
    engine_process,
    gateway_process,
)
from trimtab.engine_bridge.admission import refusal as admission_refusals
from trimtab.engine_bridge.admission.refusal import Refusal
from trimtab.engine_bridge.gateway import openapi, protocol, refusals
from trimtab.engine_bridge.gateway.proxy import SERVED

KEY: Final = "sk-acme"
MODEL: Final = "m"
ROOT: Final = Path(__file__).parents[2]
CASES: Final = 12
"""Of each operation, beside those that Schemathesis makes of every bound."""
BY_DESIGN: Final = "negative_data_rejection,positive_data_acceptance"
"""What is right in a body beside what admission reads is the engine's to judge."""
ARGUMENTS: Final = {
    "path": "/x", "allowed": "GET", "most_bytes": 1, "text": "x", "model": "x", "message": "x",
    "retry_after_s": 1.0, "most_tokens": 1, "what": "x", "wanted": 2, "limit": 1, "wait_s": 1.0,
}  # fmt: skip


@pytest.fixture(scope="module")
def house(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[tuple[GatewayProcess, EngineProcess]]:
    folder: Path = tmp_path_factory.mktemp("gateway")
    digest = hashlib.sha256(KEY.encode()).hexdigest()
    (folder / "keys.yaml").write_text(f"acme: {{tier: T0, keys_sha256: [{digest}]}}\n")
    limits = {"tiers": {"T0": {"max_prompt_tokens": 10**6, "longest_output_tokens": 1000}}}
    (folder / "admission.yaml").write_text(yaml.safe_dump(limits))
    with ExitStack() as stack:
        engine = stack.enter_context(engine_process("a", token_s=0.0))
        settings: dict[str, Any] = {
            "keys": "keys.yaml",
            "admission": "admission.yaml",
            "engines": {"a": {"url": engine.url, "models": [MODEL]}},
        }
        yield stack.enter_context(gateway_process(folder, settings)), engine


def made_by(module: ModuleType) -> set[tuple[int, str]]:
    """Status and code of every refusal that a module can make, or holds."""
    found = [one for one in vars(module).values() if isinstance(one, Refusal)]
    for function in vars(module).values():
        if not inspect.isfunction(function) or function.__module__ != module.__name__:
            continue
        if inspect.signature(function).return_annotation != "Refusal":
            continue
        named = inspect.signature(function).parameters
        for model in ("x", ""):
            for by_prefill in (True, False):
                given = {**ARGUMENTS, "model": model, "by_prefill": by_prefill, "code": None}
                chosen = {name: given[name] for name in named}
                if "code" in chosen:
                    found += [
                        function(**{**chosen, "code": code})
                        for code in openapi.REFUSED[429]
                        if code != "tenant_slowed"
                    ]
                else:
                    found.append(function(**chosen))
    return {(one.status, one.code) for one in found}


def test_the_description_names_every_refusal_and_no_other() -> None:
    def pairs(table: Any) -> set[tuple[int, str]]:
        return {(status, code) for status, codes in table.items() for code in codes}

    assert pairs(openapi.REFUSED_BEFORE) == made_by(protocol)
    assert pairs(openapi.REFUSED) == made_by(refusals) | made_by(admission_refusals)
    codes = {code for _, code in pairs(openapi.REFUSED)}
    assert codes == {*refusals.CODES, *admission_refusals.CODES}


def test_the_description_names_every_path_and_no_other(
    house: tuple[GatewayProcess, EngineProcess],
) -> None:
    gateway, _ = house
    with httpx.Client(base_url=gateway.url, headers={"Authorization": f"Bearer {KEY}"}) as client:
        described = client.get(openapi.PATH).json()["paths"]
        assert {path for path, item in described.items() if "post" in item} == SERVED
        for path, item in described.items():
            real = path.replace("{model}", MODEL)
            for method in ("GET", "POST", "PUT", "DELETE", "OPTIONS"):
                status = client.request(method, real, json={"model": MODEL}).status_code
                assert status == (200 if method.lower() in item else 405), (method, path)
        assert client.get("/v1/other").status_code == 404
    with httpx.Client(base_url=gateway.url) as nobody:
        assert nobody.get(openapi.PATH).status_code == 200
        assert nobody.post(openapi.PATH).status_code == 405
        assert nobody.get("/v1/models").status_code == 401
    with httpx.Client(base_url=gateway.admin) as operator:
        pages = operator.get(openapi.PATH).json()["paths"]
        assert set(pages) == {"/healthz", "/readyz", "/metrics", openapi.PATH}
        assert all(operator.get(page).status_code == 200 for page in pages)


def schemathesis(
    folder: Path,
    gateway: GatewayProcess,
    model: str,
    *flags: str,
    key: str = KEY,
    without: str = "",
) -> str:
    """Run it on a gateway; what it says.

    Args:
        folder: For its files.
        gateway: Whom it asks.
        model: The model that is served, in place of any text.
        flags: More of its flags.
        key: API key that it shows.
        without: Checks that it leaves out, beside those by design.
    """
    if importlib.util.find_spec("schemathesis") is None:
        pytest.skip("schemathesis is not installed")
    described = httpx.get(f"{gateway.url}{openapi.PATH}").json()
    for item in described["paths"].values():
        body = item.get("post", {}).get("requestBody")
        if body is not None:
            body["content"]["application/json"]["schema"]["properties"]["model"] = {"const": model}
    schema = folder / "openapi.json"
    schema.write_text(json.dumps(described))
    command = [
        *(sys.executable, "-m", "schemathesis.cli", "run", str(schema), "--url", gateway.url),
        *("--header", f"Authorization: Bearer {key}"),
        *("--phases", "examples,coverage,fuzzing,stateful"),
        *("--exclude-checks", ",".join(filter(None, (BY_DESIGN, without)))),
        *("--generation-deterministic", "--no-color", "--request-timeout", "30"),
        *flags,
    ]
    environment = {
        **os.environ,
        "SCHEMATHESIS_HOOKS": "tests.end_to_end.api_checks",
        "PYTHONPATH": os.pathsep.join((str(ROOT), os.environ.get("PYTHONPATH", ""))),
    }
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, f"{done.stdout[-6000:]}\n{done.stderr[-2000:]}"
    return done.stdout


def test_schemathesis_finds_nothing(
    tmp_path: Path, house: tuple[GatewayProcess, EngineProcess]
) -> None:
    gateway, engine = house
    before = engine.begun()
    said = schemathesis(tmp_path, gateway, MODEL, "--max-examples", str(CASES))
    assert "Tested: 8" in said
    assert engine.begun() > before + 100
    for one in engine.counts()["seen"]:
        assert one["headers"]["x-trimtab-tenant"] == "acme"
        assert one["headers"]["x-trimtab-tier"] == "T0"
    assert gateway.metric("trimtab_gateway_refusals_total", code="internal_error") == 0

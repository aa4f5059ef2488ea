"""`trimtab doctor` beside a real server, as an operator runs it."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
import yaml

from tests.live_parts import TRIMTAB
from tests.vllm_server import KEYS, Server

pytestmark = pytest.mark.slow


def test_a_real_engine_and_its_gateways_settings_have_no_fault(
    server: Server, tmp_path: Path
) -> None:
    key = next(iter(KEYS.values()))[0]
    plan = str(server.folder / "plan.yaml")
    behind = {"url": server.url, "models": [server.model]}
    (tmp_path / "gateway.yaml").write_text(yaml.safe_dump({"plan": plan, "engines": {"a": behind}}))
    engine = {
        "plan": plan,
        "control": str(server.folder / "control.sock"),
        "metrics": f"{server.url}/metrics",
    }
    (tmp_path / "daemon.yaml").write_text(
        yaml.safe_dump({"listen": None, "engines": {"a": engine}})
    )
    run = subprocess.run(
        [*TRIMTAB, "doctor", "--daemon", "daemon.yaml", "--gateway", "gateway.yaml",
         "--json", "found.json"],
        cwd=tmp_path, capture_output=True, text=True, timeout=120,
        env=os.environ | {"TRIMTAB_ENGINE_KEY": key},
    )  # fmt: skip
    assert run.returncode == 0, run.stdout + run.stderr
    found = json.loads((tmp_path / "found.json").read_text())["findings"]
    verdicts = {(one["area"], one["check"]): one["verdict"] for one in found}
    assert verdicts["engine a", "plan"] == "ok"
    assert verdicts["engine a", "figures"] in ("ok", "note")
    assert verdicts["gateway's engine a", "models"] == "ok"
    assert verdicts["gateway's engine a", "scheduler"] == "ok"

"""The logs of a server: complete after SIGTERM, a trace to read, free of what must not be there.

A second server on the same folders goes on where the first one stopped.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("httpx", reason="it comes with vLLM")
import pyarrow.parquet as pq

from tests.end_to_end.load import InBackground, Wish
from tests.vllm_server import KEYS, Server, running
from tests.waiting import poll
from trimtab.engine_bridge.vllm.control_client import ControlClient

pytestmark = pytest.mark.slow
SECRET_WORDS = "quagga zyxw7731 okapi "
FINISHED, TOKENS, LEFT = 12, 30, 3
# What makes equal prompts give equal ids after a restart.
STABLE = {"PYTHONHASHSEED": "0", "TRIMTAB_SALT_SECRET": "a-secret-for-this-test-alone-0123456789"}


def use(server: Server) -> None:
    asked = [Wish("acme", SECRET_WORDS * 60, TOKENS)] * FINISHED
    asked += [Wish("crowd", SECRET_WORDS * 60, 100_000, leaves_after=1)] * LEFT
    with InBackground(server, asked) as load:
        assert load.answers() == [TOKENS] * FINISHED + [None] * LEFT
    with ControlClient(server.folder / "control.sock") as control:
        poll(lambda: control.health()["engine"]["running"] == 0, what="an idle engine")
        engine = control.health()["engine"]
    assert engine["free_blocks"] == engine["blocks"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What two servers, one after the other, have left behind."""
    made = tmp_path_factory.mktemp("logged")
    for _ in range(2):
        with running(made, env=STABLE) as server:
            use(server)
        assert not (made / "control.sock").exists()
    return made


def rows(folder: Path) -> list[dict[str, Any]]:
    files = sorted(folder.glob("*.parquet"))
    assert files
    return [row for file in files for row in pq.read_table(file).to_pylist()]


def test_every_request_of_both_servers_is_there(folder: Path) -> None:
    logged = rows(folder / "traffic")
    assert len(logged) == 2 * (FINISHED + LEFT)
    finished = [row for row in logged if row["outcome"] == "finished"]
    assert len(finished) == 2 * FINISHED
    assert {row["output_tokens"] for row in finished} == {TOKENS}
    assert {row["tier"] for row in finished} == {"T0"}
    assert {row["tenant"] for row in finished} == {"acme"}
    assert all(0 < row["ttft_s"] < row["e2e_s"] for row in finished)
    cancelled = [row for row in logged if row["outcome"] == "cancelled"]
    assert len(cancelled) == 2 * LEFT
    # One tenant's equal prompts have equal ids over the restart; another tenant's differ.
    ids = {row["tenant"]: set() for row in logged}
    for row in logged:
        ids[row["tenant"]].add(tuple(row["prefix_ids"][:4]))
    assert {tenant: len(found) for tenant, found in ids.items()} == {"acme": 1, "crowd": 1}
    assert ids["acme"] != ids["crowd"]


def test_every_step_is_there(folder: Path) -> None:
    steps = rows(folder / "steps")
    # Each finished request's last token is a step of both servers; who left may have no step after.
    assert 2 * FINISHED <= sum(row["finished"] for row in steps) <= 2 * (FINISHED + LEFT)
    assert sum(row["decodes"] for row in steps) >= 2 * FINISHED * (TOKENS - 1)
    assert all(row["step_ms"] > 0 for row in steps)


def test_the_traffic_log_is_a_trace(folder: Path, tmp_path: Path) -> None:
    trimtab = [sys.executable, "-m", "trimtab.controller.cli.app"]
    traffic = str(folder / "traffic")
    info = subprocess.run(
        [*trimtab, "trace", "info", traffic], capture_output=True, text=True, timeout=120
    )
    assert info.returncode == 0, info.stderr
    assert str(2 * (FINISHED + LEFT)) in info.stdout
    command = [*trimtab, "whatif", "--trace", traffic, "--engine", "h100:llama-3.1-70b-tp8"]
    study = tmp_path / "study.json"
    done = subprocess.run(
        [*command, "--json", str(study)], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert '"results"' in study.read_text()


def test_no_log_holds_a_prompt_an_answer_or_a_key(folder: Path) -> None:
    secrets = [*SECRET_WORDS.split(), *(key for key, _ in KEYS.values())]
    secrets += [STABLE["TRIMTAB_SALT_SECRET"]]
    files = [path for path in folder.rglob("*") if path.is_file() and path.name != "keys.yaml"]
    assert {path.suffix for path in files} >= {".log", ".parquet", ".db"}
    for path in files:
        content = path.read_bytes()
        if path.suffix == ".parquet":
            # Pages are compressed: look at the values too.
            content += repr(pq.read_table(path).to_pydict()).encode()
        for secret in secrets:
            assert secret.encode() not in content, f"{secret} in {path.name}"

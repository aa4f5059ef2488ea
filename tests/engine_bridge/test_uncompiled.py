"""A process that asks for it never loads the compiler, and reckons the same."""

from __future__ import annotations

import os
import subprocess
import sys

from trimtab.engine_bridge.admission.prefill import tokens_within
from trimtab.engine_bridge.engine_spec import get_engine_spec
from trimtab.engine_bridge.gateway.accounts import gpu_cost

ENGINE = "h100:llama-3.1-70b-tp8"
_GATEWAY = f"""
import os, sys
from trimtab.engine_bridge.uncompiled import keep_uncompiled
keep_uncompiled()
from trimtab.engine_bridge.admission.prefill import tokens_within
from trimtab.engine_bridge.engine_spec import get_engine_spec
from trimtab.engine_bridge.gateway import server
from trimtab.engine_bridge.gateway.accounts import gpu_cost
spec = get_engine_spec("{ENGINE}")
print(gpu_cost(spec)(1234, 56, 789).hex(), tokens_within(spec, 2000.0))
print([name for name in ("numba", "llvmlite", "scipy", "pandas") if name in sys.modules])
print(os.environ.get("NUMBA_DISABLE_JIT"))
"""


def test_the_gateway_needs_no_compiler_and_reckons_the_same() -> None:
    environment = {k: v for k, v in os.environ.items() if k != "NUMBA_DISABLE_JIT"}
    said = subprocess.run(
        [sys.executable, "-c", _GATEWAY], env=environment, capture_output=True, text=True
    )
    assert said.returncode == 0, said.stderr
    figures, loaded, left = said.stdout.splitlines()
    spec = get_engine_spec(ENGINE)
    assert figures == f"{gpu_cost(spec)(1234, 56, 789).hex()} {tokens_within(spec, 2000.0)}"
    assert loaded == "[]"
    assert left == "None", "processes that it starts would do without the compiler, too"

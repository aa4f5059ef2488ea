"""What several tests of the plug-in need: the parity benchmark as a module."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

PARITY = Path(__file__).resolve().parents[3] / "benchmarks" / "parity.py"


@pytest.fixture(scope="session")
def parity() -> ModuleType:
    """`benchmarks/parity.py`, which imports vLLM."""
    pytest.importorskip("vllm", reason="compares with vLLM's own scheduler")
    spec = importlib.util.spec_from_file_location("parity", PARITY)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["parity"] = module
    with pytest.MonkeyPatch.context() as patched:
        # It has a module beside it, as every benchmark of several files.
        patched.syspath_prepend(str(PARITY.parent))
        spec.loader.exec_module(module)
    return module

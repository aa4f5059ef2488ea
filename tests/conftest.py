"""Fixtures that every package's tests may use."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import hypothesis
import pytest

from tests.vllm_server import server  # noqa: F401  (a fixture: one server for all folders)
from trimtab.engine_bridge.plan import Plan, load_plan

# What `make test` has put beside the interpreter (Prometheus, Redis) is found in any case.
os.environ["PATH"] = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", "")))

hypothesis.settings.register_profile("repeatable", derandomize=True, deadline=None)
hypothesis.settings.load_profile("repeatable")


@pytest.fixture(scope="session")
def shared_dir() -> Path:
    """Folder of real traces and measurements beside the checkout; a test without it skips."""
    folder = Path(__file__).resolve().parents[2] / "shared"
    if not folder.is_dir():
        pytest.skip("no folder of real traces beside the checkout")
    return folder


@pytest.fixture(scope="session")
def default_plan() -> Plan:
    """The shipped default plan."""
    return load_plan()

"""Real MLflow on SQLite: its database takes seconds to be made, so one is made and copied."""

from __future__ import annotations

import itertools
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from trimtab.agents.bundle import Bundle, write_bundle
from trimtab.engine_bridge.plan import load_plan
from trimtab.envs.action import ActionMap
from trimtab.envs.observation_schema import observation_schema
from trimtab.training.learning.tracking_place import connect


@pytest.fixture(scope="session")
def empty_database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("mlflow") / "empty.db"
    connect(f"sqlite:///{path}").search_experiments()
    return path


@pytest.fixture
def tracking_uri(empty_database: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A new, empty place for runs, which commands find in the environment."""
    folder = tmp_path / "mlflow"
    folder.mkdir()
    shutil.copyfile(empty_database, folder / "mlflow.db")
    uri = f"sqlite:///{folder / 'mlflow.db'}"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    return uri


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    """As in training: networks of 64 gain nothing from more."""
    torch.set_num_threads(1)


def _bundle(folder: Path, seed: int) -> Path:
    plan = load_plan("default")
    observation, action = observation_schema(plan), ActionMap(plan).schema
    rng = np.random.default_rng(seed)
    sizes = (observation.size, 8, len(action.names))
    layers = tuple(
        (rng.normal(0, 0.1, (m, n)).astype(np.float32), np.zeros(n, np.float32))
        for m, n in itertools.pairwise(sizes)
    )
    write_bundle(
        Bundle(
            observation_digest=observation.digest,
            action_schema=action,
            layers=layers,
            envelope_low=np.full(observation.size, -1, np.float32),
            envelope_high=np.full(observation.size, 1, np.float32),
            plan_digest=plan.digest,
            tier_names=plan.tier_names,
            pool_names=plan.pool_names,
        ),
        folder,
    )
    return folder


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    """A folder with a bundle of the default plan, not trained."""
    return _bundle(tmp_path / "bundle", 1)


@pytest.fixture
def other_bundle(tmp_path: Path) -> Path:
    return _bundle(tmp_path / "other-bundle", 2)

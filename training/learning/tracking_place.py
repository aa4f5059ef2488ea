"""Where runs are tracked: the URI, made absolute, and the settings that MLflow takes from outside.

It imports MLflow only inside functions, after the environment is set: MLflow reads it at import.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from trimtab.engine_bridge.errors import FlagError, TrimtabError

if TYPE_CHECKING:
    from mlflow import MlflowClient

URI_VARIABLE = "MLFLOW_TRACKING_URI"
DEFAULT_EXPERIMENT = "trimtab"
_SQLITE = "sqlite:///"
_SCHEMES = ("sqlite", "http", "https", "postgresql", "mysql", "mssql", "databricks")
_QUIET = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "DO_NOT_TRACK": "true",
    "MLFLOW_ALLOW_PICKLE_DESERIALIZATION": "false",
    # MLflow's own 7 retries of 120 s would hold a command for many minutes.
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    "GIT_PYTHON_REFRESH": "quiet",
}


def tracking_uri(working_directory: Path) -> str:
    """The URI that `MLFLOW_TRACKING_URI` names, else `mlflow.db` in the working directory.

    Raises:
        FlagError: a store that MLflow refuses, or that is none.
    """
    given = os.environ.get(URI_VARIABLE, "").strip()
    if not given:
        return f"{_SQLITE}{working_directory.resolve() / 'mlflow.db'}"
    scheme = urlsplit(given).scheme.split("+")[0]
    if scheme == "file" and os.environ.get("MLFLOW_ALLOW_FILE_STORE", "").lower() == "true":
        return given
    if scheme not in _SCHEMES:
        raise FlagError(
            URI_VARIABLE,
            value=shown(given),
            bound=f"a URI that begins with {', '.join(f'{name}:' for name in _SCHEMES)}",
            remedy="MLflow keeps runs in a database or on a server, for instance "
            "sqlite:////absolute/path/mlflow.db",
        )
    database = given.removeprefix(_SQLITE)
    if database != given and not database.startswith("/"):
        return f"{_SQLITE}{working_directory.resolve() / database}"
    return given


def shown(uri: str) -> str:
    """The URI without a password, for people."""
    return re.sub(r"(://[^:/@]*):[^@/]*@", r"\1:***@", uri)


def artifact_folder(uri: str) -> str | None:
    """Where a database in a file keeps artifacts: beside it; None leaves it to the server."""
    database = uri.removeprefix(_SQLITE)
    return str(Path(database).parent / "mlruns") if database != uri else None


def connect(uri: str) -> MlflowClient:
    """A client of the place. A new SQLite database takes some seconds to be made.

    Raises:
        TrimtabError: MLflow is not installed.
    """
    os.environ |= {name: os.environ.get(name, value) for name, value in _QUIET.items()}
    try:
        from mlflow import MlflowClient
    except ImportError as error:
        raise TrimtabError(
            f"{error.name} is not installed; install the extra: pip install 'trimtab[train]'"
        ) from error
    _quiet_migrations()
    return MlflowClient(tracking_uri=uri, registry_uri=uri)


def _quiet_migrations() -> None:
    """Keep the many lines that a new database's migrations print off the user's terminal."""
    import logging

    for name in ("alembic", "mlflow"):
        logging.getLogger(name).setLevel(logging.WARNING if "-v" in sys.argv else logging.ERROR)

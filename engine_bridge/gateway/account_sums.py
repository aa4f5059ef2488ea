"""Sums the gateway's accounts by tenant, tier or day."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pyarrow.parquet as pq

from trimtab.engine_bridge.errors import InputError
from trimtab.engine_bridge.gateway.accounts import METADATA_KEY, PREFIX

GROUPINGS: Final = ("tenant", "tier", "model", "engine", "day")
"""What can be summed by."""
_COLUMNS: Final = (
    "time_s", "tenant", "tier", "model", "engine", "prompt_tokens", "cached_tokens",
    "output_tokens", "gpu_ms", "outcome",
)  # fmt: skip
_FINISHED: Final = "finished"
_REFUSED: Final = "refused"


class AccountsError(InputError):
    """Accounts cannot be read."""


@dataclass(kw_only=True)
class AccountSum:
    """What one group took."""

    requests: int = 0
    finished: int = 0
    refused: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    gpu_ms: float = 0.0
    """0 where no engine's step times are known."""

    def as_json(self) -> dict[str, Any]:
        """The same for machines."""
        return asdict(self)


def sum_accounts(
    folder: Path, *, by: str, since_s: float | None = None, until_s: float | None = None
) -> dict[str, AccountSum]:
    """Sum the rows of all files in a folder.

    Args:
        folder: Where the gateway writes them.
        by: One of `GROUPINGS`.
        since_s: Requests that began then or later, seconds since 1970; None: all.
        until_s: Requests that began before.

    Returns:
        Sums by group, in the order of the groups' names.

    Raises:
        AccountsError: the folder or a file cannot be read.
    """
    sums: dict[str, AccountSum] = {}
    for row in _rows(_files(folder)):
        time_s = row["time_s"]
        if (since_s is not None and time_s < since_s) or (
            until_s is not None and time_s >= until_s
        ):
            continue
        group = _day(time_s) if by == "day" else row[by]
        _add(sums.setdefault(group, AccountSum()), row)
    return dict(sorted(sums.items()))


def _files(folder: Path) -> list[Path]:
    if not folder.is_dir():
        raise AccountsError(str(folder), bound="a folder that exists", remedy="check the path")
    files = sorted(folder.glob(f"{PREFIX}-*.parquet"))
    if not files:
        raise AccountsError(
            str(folder),
            bound=f"a folder with {PREFIX}-*.parquet",
            remedy="name the gateway's usage_dir; it writes every five minutes, and when it stops",
        )
    return files


def _rows(files: Iterable[Path]) -> Iterable[dict[str, Any]]:
    for path in files:
        try:
            with pq.ParquetFile(path) as file:
                if METADATA_KEY not in (file.schema_arrow.metadata or {}):
                    raise AccountsError(str(path), bound="a file of the gateway's accounts")
                for batch in file.iter_batches(columns=list(_COLUMNS)):
                    yield from batch.to_pylist()
        except FileNotFoundError:
            continue  # the gateway deletes its oldest
        except (OSError, pa.ArrowException) as error:
            text = " ".join(str(error).split())[:120]
            raise AccountsError(str(path), bound="a readable Parquet file", remedy=text) from None


def _add(total: AccountSum, row: dict[str, Any]) -> None:
    total.requests += 1
    total.finished += row["outcome"] == _FINISHED
    total.refused += row["outcome"] == _REFUSED
    total.prompt_tokens += row["prompt_tokens"] or 0
    total.cached_tokens += row["cached_tokens"] or 0
    total.output_tokens += row["output_tokens"] or 0
    total.gpu_ms += row["gpu_ms"] or 0.0


def _day(time_s: float) -> str:
    return datetime.fromtimestamp(time_s, UTC).date().isoformat()

"""The accounts: one row a request in Parquet files that rotate; what it took, and from whom.

No prompt, no answer, no key. What it sums up to, `account_sums` reads.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import pyarrow as pa

from trimtab.engine_bridge.engine_spec import EngineSpec
from trimtab.engine_bridge.gateway.exchange import Exchange
from trimtab.engine_bridge.rules.cost import TYPICAL_DECODES, decode_cost_ms, prefill_cost_ms
from trimtab.engine_bridge.step_time import linear_ms
from trimtab.engine_bridge.vllm.rotating_parquet import Limits, RotatingParquet, json_metadata

METADATA_KEY: Final = b"trimtab.accounts"
"""Key of a file's metadata: schema and lost rows, as JSON."""
PREFIX: Final = "accounts"
"""First part of the files' names."""
ROWS_PER_FILE: Final = 4096
LONGEST_S: Final = 300.0
"""Rows wait so long at most before they are written, seconds."""
_LONGEST_TEXT: Final = 256
"""Characters of a model's name or a path: clients choose both."""
_KEPT: Final = Limits(most_files=20_000, most_bytes=8 << 30)
_SCHEMA: Final = pa.schema(
    [
        ("time_s", pa.float64()),
        ("tenant", pa.string()),
        ("tier", pa.string()),
        ("model", pa.string()),
        ("engine", pa.string()),
        ("path", pa.string()),
        ("prompt_tokens", pa.int64()),
        ("cached_tokens", pa.int64()),
        ("output_tokens", pa.int64()),
        ("gpu_ms", pa.float64()),
        ("first_token_s", pa.float64()),
        ("request_s", pa.float64()),
        ("status", pa.int16()),
        ("outcome", pa.string()),
        ("code", pa.string()),
        ("retries", pa.int16()),
    ]
)
_GPU_MS_AT: Final = _SCHEMA.names.index("gpu_ms")
_ENGINE_AT: Final = _SCHEMA.names.index("engine")
_TOKENS_AT: Final = _SCHEMA.names.index("prompt_tokens")


class _Rows:
    """Rows that become one file; GPU time is reckoned by the writer's thread."""

    def __init__(
        self,
        rows: list[list[Any]],
        costs: Mapping[str, Callable[[int, int, int], float]],
        metadata: Callable[[], dict[bytes, bytes]],
    ) -> None:
        self._rows, self._costs, self._metadata = rows, costs, metadata

    def __len__(self) -> int:
        return len(self._rows)

    def table(self) -> pa.Table:
        for row in self._rows:
            cost = self._costs.get(row[_ENGINE_AT])
            prompt, cached, output = row[_TOKENS_AT : _TOKENS_AT + 3]
            if cost is not None and prompt is not None:
                row[_GPU_MS_AT] = cost(prompt, cached, output or 0)
        columns = [list(column) for column in zip(*self._rows, strict=True)]
        arrays = [
            pa.array(column, field.type) for column, field in zip(columns, _SCHEMA, strict=True)
        ]
        table = pa.Table.from_arrays(arrays, schema=_SCHEMA)
        return table.replace_schema_metadata(self._metadata())


class Accounts:
    """Collects what requests took; for one thread."""

    def __init__(
        self,
        folder: Path,
        specs: Mapping[str, EngineSpec],
        *,
        unix_s: Callable[[], float] = time.time,
    ) -> None:
        """Begin.

        Args:
            folder: Where the files go, `accounts-*.parquet`.
            specs: Step times by engine name; without an engine's its rows have no GPU time.
            unix_s: Seconds since 1970.

        Raises:
            LogFolderError: the folder cannot be written to.
        """
        self._unix_s = unix_s
        self._out = RotatingParquet(folder, PREFIX, limits=_KEPT, wall_s=unix_s)
        self._rows: list[list[Any]] = []
        self._since_s = 0.0
        self.set_engines(specs)

    def set_engines(self, specs: Mapping[str, EngineSpec]) -> None:
        """Take other engines' step times from now on."""
        self._costs = {name: gpu_cost(spec) for name, spec in specs.items()}

    @property
    def folder(self) -> Path:
        """Where the files are."""
        return self._out.folder

    @property
    def lost_rows(self) -> int:
        """Rows lost since the start, because the disk was slow or full."""
        return self._out.dropped_rows

    def add(self, exchange: Exchange, now_s: float) -> None:
        """Append one request that has ended.

        Args:
            exchange: The request.
            now_s: The event loop's time.
        """
        identity, usage = exchange.identity, exchange.usage
        if identity is None:
            return  # nobody's
        output = usage.output_tokens
        if output is None and exchange.streams and exchange.started:
            output = exchange.events
        first_s = exchange.first_token_s
        unix_s = self._unix_s()
        if not self._rows:
            self._since_s = now_s
        self._rows.append(
            [
                unix_s - (now_s - exchange.began_s), identity.tenant, identity.tier,
                _storable(exchange.model), exchange.engine, _storable(exchange.path),
                usage.prompt_tokens, usage.cached_tokens, output, None,
                None if first_s is None else first_s - exchange.began_s,
                now_s - exchange.began_s, exchange.status,
                "refused" if exchange.code else exchange.outcome.value, exchange.code,
                exchange.retries,
            ]
        )  # fmt: skip
        if len(self._rows) >= ROWS_PER_FILE:
            self.flush()

    def flush_if_old(self, now_s: float) -> None:
        """Write what has waited long enough."""
        if self._rows and now_s - self._since_s >= LONGEST_S:
            self.flush()

    def flush(self) -> None:
        """Hand what is there to the writer; does not wait for it."""
        rows, self._rows = self._rows, []
        self._out.put(_Rows(rows, self._costs, self._metadata))

    def close(self, timeout_s: float = 10.0) -> None:
        """Write what is there and end the writer."""
        self.flush()
        self._out.close(timeout_s)

    def _metadata(self) -> dict[bytes, bytes]:
        return json_metadata(METADATA_KEY, {"schema": 1, "lost_rows": self.lost_rows})


def _storable(text: str) -> str:
    """A client's text as a column can hold it: half a surrogate pair would lose the whole file."""
    return text[:_LONGEST_TEXT].encode("utf-8", "replace").decode()


def gpu_cost(spec: EngineSpec) -> Callable[[int, int, int], float]:
    """GPU-milliseconds of a request on an engine, over all its GPUs.

    By rule 2's costs (`rules.cost`): prefill in full steps, decode in a batch of 32. So it does not
    depend on who else was there, and equal requests cost the same.

    Returns:
        A function of prompt, cached and output tokens.
    """
    coef = spec.coef
    step = float(spec.max_num_batched_tokens)
    prefill_share_ms = linear_ms(coef, step, 1.0) / step
    decode_share_ms = linear_ms(coef, TYPICAL_DECODES, TYPICAL_DECODES) / TYPICAL_DECODES

    def cost(prompt: int, cached: int, output: int) -> float:
        fresh = float(max(0, prompt - cached))
        prefill_ms = prefill_cost_ms(coef, fresh, float(cached), prefill_share_ms)
        decode_ms = decode_cost_ms(coef, float(prompt), float(output), decode_share_ms)
        return float(spec.tp * (prefill_ms + decode_ms))

    return cost

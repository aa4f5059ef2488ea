"""Reads requests whose latency was measured on a real engine, in the layouts of published data.

Engine benchmarks (`requests.jsonl`), OpenTelemetry spans (`traces.json`) and a load tool's CSV. It
says which requests ran alone; it replays and fits nothing.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Final, Self

import numpy as np
import numpy.typing as npt
import pandas as pd

from trimtab.engine_bridge.errors import TableError
from trimtab.training.calibration.table import FloatArray

CLIENT_COLUMNS: Final = (
    "prompt_tokens",
    "generation_tokens",
    "ttft",
    "generation_time",
    "launch_time",
)
_BENCH_KEYS: Final = ("input_toks", "output_toks", "queued_ts", "first_token_ts", "last_token_ts")
_NANO: Final = 1e-9


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Requests in the order of their arrival; seconds, shape (n,) each."""

    row: npt.NDArray[np.int64]
    """Place in the file, or in the workload where the file names it."""
    start_s: FloatArray
    """Arrival, from the first one."""
    prompt_tokens: FloatArray
    output_tokens: FloatArray
    ttft_s: FloatArray
    e2e_s: FloatArray
    decode_s: FloatArray
    """First to last token."""
    prefill_s: FloatArray
    """First scheduled to first token; NaN where not known."""
    host_s: FloatArray
    """Part of `ttft_s` outside the engine; NaN where not known."""
    names: tuple[str, ...] = ()
    """Request ids, where the file has them."""

    def __len__(self) -> int:
        """Number of requests."""
        return len(self.start_s)

    @property
    def tpot_s(self) -> FloatArray:
        """Mean time of the tokens after the first; NaN with one token."""
        later = self.output_tokens - 1.0
        return np.where(later > 0, self.decode_s / np.maximum(later, 1.0), np.nan)

    def take(self, rows: npt.NDArray[np.int64]) -> Self:
        """The given requests."""
        columns: dict[str, Any] = {f.name: getattr(self, f.name) for f in fields(self)}
        names = columns.pop("names")
        taken = {name: values[rows] for name, values in columns.items()}
        return type(self)(**taken, names=tuple(names[row] for row in rows) if names else ())

    def opening(self) -> int:
        """How many of the first requests ran one after the other, each alone."""
        ends = np.maximum.accumulate(self.start_s + self.e2e_s)
        later = np.flatnonzero(self.start_s[1:] < ends[:-1])
        return int(later[0]) if len(later) else len(self)

    def alone(self) -> npt.NDArray[np.int64]:
        """The requests that overlap no other one."""
        ends = np.maximum.accumulate(self.start_s + self.e2e_s)
        after = np.concatenate(([True], self.start_s[1:] >= ends[:-1]))
        before = np.concatenate((self.start_s[1:] >= ends[:-1], [True]))
        return np.flatnonzero(after & before)


def read_bench(path: Path) -> Measured:
    """Read `requests.jsonl` of an engine benchmark: times of the engine's own clock.

    The arrival is `queued_ts`, when the engine took the request in.

    Raises:
        TableError: a line lacks a key or is not JSON.
    """
    rows = []
    for number, item in enumerate(json_lines(path)):
        try:
            times = [float(item[key]) for key in _BENCH_KEYS]
            place = str(item.get("request_id", number)).rsplit("-", 1)[-1]
            scheduled = float(item.get("scheduled_ts", "nan"))
            rows.append((int(place), *times, scheduled))
        except (KeyError, TypeError, ValueError) as error:
            raise TableError(
                f"{path} line {number + 1}",
                value=str(error),
                bound=f"keys {', '.join(_BENCH_KEYS)}",
            ) from None
    if not rows:
        raise TableError(str(path), value="no rows", bound="a request a line")
    place, prompt, output, queued, first, last, scheduled = np.array(rows, np.float64).T
    return _ordered(
        row=place,
        start_s=queued,
        prompt_tokens=prompt,
        output_tokens=output,
        ttft_s=first - queued,
        e2e_s=last - queued,
        decode_s=last - first,
        prefill_s=first - scheduled,
        host_s=np.zeros(len(rows)),
    )


def read_spans(path: Path) -> Measured:
    """Read OpenTelemetry spans `llm_request` as vLLM sends them, one JSON object a line.

    Raises:
        TableError: a line is not such an object, or no span has the needed attributes.
    """
    rows: list[tuple[float, ...]] = []
    names: list[str] = []
    for item in json_lines(path):
        for span in _spans(item):
            found = _span_row(span)
            if found is not None:
                rows.append(found)
                names.append(_attributes(span).get("gen_ai.request.id", ""))
    if not rows:
        raise TableError(str(path), value="no span llm_request", bound="spans with latencies")
    start, prompt, output, ttft, e2e, queue, prefill, decode = np.array(rows, np.float64).T
    return _ordered(
        row=np.arange(len(rows)),
        start_s=start,
        prompt_tokens=prompt,
        output_tokens=output,
        ttft_s=ttft,
        e2e_s=e2e,
        decode_s=decode,
        prefill_s=prefill,
        host_s=ttft - queue - prefill,
        names=tuple(names),
    )


def read_client(path: Path) -> Measured:
    """Read a load tool's CSV: `launch_time`, `ttft`, `generation_time`, tokens of each request.

    Raises:
        TableError: a column is missing or a cell is not a number.
    """
    try:
        table = pd.read_csv(path)
    except (OSError, ValueError, UnicodeDecodeError) as error:
        raise TableError(str(path), value=str(error).split("\n")[0], bound="CSV") from None
    missing = [name for name in CLIENT_COLUMNS if name not in table.columns]
    if missing or not len(table):
        value = f"no column {missing[0]}" if missing else "no rows"
        raise TableError(str(path), value=value, bound=f"rows with {', '.join(CLIENT_COLUMNS)}")
    numbers = table[list(CLIENT_COLUMNS)].apply(pd.to_numeric, errors="coerce")
    good = np.isfinite(numbers).all(axis=1) & (numbers.generation_tokens >= 1)
    if not good.any():
        raise TableError(str(path), value="no finished request", bound="numbers in every column")
    prompt, output, ttft, decode, launch = numbers[good].to_numpy(np.float64).T
    unknown = np.full(len(prompt), np.nan)
    return _ordered(
        row=np.flatnonzero(good),
        start_s=launch,
        prompt_tokens=np.maximum(prompt, 1.0),
        output_tokens=output,
        ttft_s=ttft,
        e2e_s=ttft + decode,
        decode_s=decode,
        prefill_s=unknown,
        host_s=unknown,
    )


def _ordered(
    *, names: tuple[str, ...] = (), row: npt.NDArray[Any], **columns: FloatArray
) -> Measured:
    columns["start_s"] = columns["start_s"] - columns["start_s"].min()
    order = np.argsort(columns["start_s"], kind="stable")
    taken: dict[str, Any] = {name: values[order] for name, values in columns.items()}
    return Measured(
        row=np.asarray(row)[order].astype(np.int64),
        names=tuple(names[place] for place in order) if names else (),
        **taken,
    )


def open_text(path: Path) -> Iterator[str]:
    """The lines of a text file, compressed or not.

    Raises:
        TableError: it cannot be read.
    """
    try:
        if path.suffix == ".gz":
            with gzip.open(path, "rt", encoding="utf-8", errors="replace") as file:
                yield from file
        else:
            with path.open(encoding="utf-8", errors="replace") as file:
                yield from file
    except (OSError, EOFError) as error:
        raise TableError(str(path), value=str(error), bound="a readable file") from None


def json_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The JSON objects of a file with one a line, compressed or not.

    Raises:
        TableError: a line holds none.
    """
    for number, line in enumerate(open_text(path)):
        if not line.strip():
            continue
        try:
            item = json.loads(line)
        except ValueError:
            item = None
        if not isinstance(item, dict):
            raise TableError(f"{path} line {number + 1}", value=line[:40], bound="a JSON object")
        yield item


def _spans(item: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for resource in item.get("resourceSpans", ()):
        for scope in resource.get("scopeSpans", ()):
            for span in scope.get("spans", ()):
                if span.get("name") == "llm_request":
                    yield span


def _attributes(span: dict[str, Any]) -> dict[str, Any]:
    return {
        entry["key"]: next(iter(entry["value"].values())) for entry in span.get("attributes", ())
    }


def _span_row(span: dict[str, Any]) -> tuple[float, ...] | None:
    values = _attributes(span)
    try:
        return (
            int(span["startTimeUnixNano"]) * _NANO,
            float(values["gen_ai.usage.prompt_tokens"]),
            float(values["gen_ai.usage.completion_tokens"]),
            float(values["gen_ai.latency.time_to_first_token"]),
            float(values["gen_ai.latency.e2e"]),
            float(values["gen_ai.latency.time_in_queue"]),
            float(values["gen_ai.latency.time_in_model_prefill"]),
            float(values["gen_ai.latency.time_in_model_decode"]),
        )
    except (KeyError, TypeError, ValueError):
        # A request that failed has a span without latencies.
        return None

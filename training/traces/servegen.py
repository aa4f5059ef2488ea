"""Draw requests from ServeGen's client descriptions: rate, burstiness and lengths over 14 days.

The files hold distributions, no requests; prompt and answer lengths are drawn apart, because their
correlation was not published.
"""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import numpy.typing as npt

from trimtab.engine_bridge.errors import TraceError
from trimtab.engine_bridge.trace import Trace
from trimtab.training.traces.assemble import Column, build_sorted, natural_key, with_sorted_names
from trimtab.training.traces.media_build import at_the_head
from trimtab.training.traces.options import Label, ReadOptions
from trimtab.training.traces.servegen_client import Client, nearest_table, picked, windows_of
from trimtab.training.traces.servegen_media import DrawnItems
from trimtab.training.traces.source import JsonObject, json_file
from trimtab.training.traces.table import LONGEST_S, MOST_TOKENS, read_chunks

FloatArray = npt.NDArray[np.float64]
LongArray = npt.NDArray[np.int64]

TRACE_COLUMNS = ("start_s", "rate", "cv", "pattern", "shape", "scale")
FILE_NAME = re.compile(r"chunk-(\d+)-(trace\.csv|dataset\.json)(\.gz)?$")
DEFAULT_MOST_RATE = 10.0
"""Mean requests per second of all clients together where the caller names no rate."""
_SHAPES = (0.05, 1000.0)


def read_servegen(
    path: Path, rng: np.random.Generator, label: Label, options: ReadOptions
) -> Trace:
    """Draw the requests of a client (either of its two files) or of a directory of clients.

    Each client is a tenant. Inter-arrivals follow the window's own distribution and are rescaled to
    its rate; the rates of all clients are scaled by one factor. Silent windows stay silent.

    Args:
        path: File or directory.
        rng: Draws everything.
        label: Tier of every row; the tenants' prefix where one is given.
        options: Which part of the 14 days, and the mean rate.

    Raises:
        TraceError: a file is not a client's, or nobody asks anything in that part.
    """
    clients = load_clients(path)
    return draw_clients(path.name, clients, rng, label, options)


def load_clients(path: Path) -> list[Client]:
    """Read the clients of a directory, or the one that a file belongs to, by number.

    Raises:
        TraceError: a file is not a client's, or its other file is missing.
    """
    if path.is_dir():
        files = [file for file in path.iterdir() if FILE_NAME.match(file.name)]
        folder = path
    else:
        files, folder = [path], path.parent
        if not FILE_NAME.match(path.name):
            raise TraceError(
                path.name, bound="named chunk-N-trace.csv or chunk-N-dataset.json (or .gz)"
            )
    numbers = {FILE_NAME.match(file.name).group(1) for file in files}  # type: ignore[union-attr]
    return [_client(folder, number) for number in sorted(numbers, key=natural_key)]


def _client(folder: Path, number: str) -> Client:
    trace, dataset = (_part(folder, number, kind) for kind in ("trace.csv", "dataset.json"))
    start, rate = Column(np.float64), Column(np.float64)
    shape, weibull = Column(np.float64), Column(np.bool_)
    for chunk in read_chunks(trace, wanted=TRACE_COLUMNS, names=TRACE_COLUMNS):
        start.extend(chunk.numbers("start_s", low=0, high=LONGEST_S))
        rate.extend(chunk.numbers("rate", low=0, high=1e7))
        patterns = np.array(chunk.texts("pattern").to_pylist(), np.str_)
        strange = ~np.isin(patterns, ("", "Gamma", "Weibull"))
        if strange.any():
            row = int(np.argmax(strange))
            raise TraceError(
                chunk.place(row),
                key="pattern",
                value=str(patterns[row]),
                bound="Gamma, Weibull or empty",
            )
        shapes = chunk.numbers("shape", low=0, high=1e9, missing=0.0)
        known = (patterns != "") & (shapes > 0)
        shape.extend(np.where(known, np.clip(shapes, *_SHAPES), 1.0))
        weibull.extend(known & (patterns == "Weibull"))
    starts = start.finish()
    if np.any(np.diff(starts) <= 0):
        row = int(np.argmax(np.diff(starts) <= 0)) + 2
        raise TraceError(f"{trace.name} line {row}", key="start_s", bound="after the line above")
    lengths = _length_windows(json_file(dataset), dataset.name)
    return Client(
        f"client-{number}", starts, rate.finish(), weibull.finish(), shape.finish(), lengths,
        dataset.name,
    )  # fmt: skip


def _part(folder: Path, number: str, kind: str) -> Path:
    for suffix in ("", ".gz"):
        file = folder / f"chunk-{number}-{kind}{suffix}"
        if file.exists():
            return file
    raise TraceError(
        str(folder / f"chunk-{number}-{kind}"), remedy="the client's other file is missing"
    )


def _length_windows(record: JsonObject, name: str) -> dict[float, JsonObject]:
    windows: dict[float, JsonObject] = {}
    for key, value in record.items():
        if not re.fullmatch(r"\d{1,9}(\.\d{1,9})?", key) or not isinstance(value, dict):
            raise TraceError(name, key=key[:40], bound="a window's start (s) and its object")
        windows[float(key)] = value
    if not windows:
        raise TraceError(name, remedy="the file has no windows")
    return windows


def draw_clients(
    where: str,
    clients: list[Client],
    rng: np.random.Generator,
    label: Label,
    options: ReadOptions,
) -> Trace:
    """Draw requests of clients over one part of their recorded time.

    Raises:
        TraceError: the part lies outside the record, or nobody asks anything in it.
    """
    start_s = options.window_start_s
    notes = []
    if start_s is None:
        start_s = typical_start_s(clients, options.window_s)
        notes.append(
            f"{where}: drawn from an average part of the record, from {start_s:,.0f} s on."
        )
    end_s = start_s + options.window_s
    recorded = sum(_expected(client, start_s, end_s) for client in clients) / options.window_s
    if recorded <= 0:
        last_s = max(float(client.start_s[-1]) + client.window_s for client in clients)
        raise TraceError(
            where,
            key="window",
            value=f"{start_s:g} to {end_s:g} s",
            bound=f"one in which a client is active (the record ends at {last_s:g} s)",
            remedy="choose another --window-start-s",
        )
    wanted = options.rate_per_s or min(recorded, DEFAULT_MOST_RATE)
    notes.append(
        f"{where}: rates of {len(clients)} clients scaled by {wanted / recorded:.3g} "
        f"to {wanted:g} requests/s."
    )
    arrival, prompt, output = Column(np.float64), Column(np.int32), Column(np.int32)
    tenant, items = Column(np.int32), DrawnItems()
    for number, client in enumerate(clients):
        times = client_arrivals(client, start_s, end_s, wanted / recorded, rng)
        arrival.extend(times - start_s)
        lengths = _draw_lengths(client, times, rng)
        whole = lengths[0] + items.draw(client, times, rng)
        if whole.max(initial=0) > MOST_TOKENS:
            raise TraceError(
                client.file,
                value=f"a request of {whole.max():,} tokens",
                bound=f"at most {MOST_TOKENS:,} with all that it shows",
            )
        prompt.extend(whole)
        output.extend(lengths[1])
        tenant.extend(np.full(len(times), number))
    if not len(arrival):
        raise TraceError(where, key="rate", value=wanted, remedy="too low: no request was drawn")
    times, owners = arrival.finish(), tenant.finish()
    order = np.argsort(times, kind="stable")
    shown = at_the_head(*items.finish())
    if len(shown):
        notes.append(
            f"{where}: images, audio and videos stand at the head of their prompts, in this order."
        )
    trace = build_sorted(
        where,
        arrival_s=times[order],
        prompt_tokens=prompt.finish()[order],
        output_tokens=output.finish()[order],
        tenant=owners[order],
        media=shown.take(order),
        tier_names=(label.tier,),
        tenant_names=tuple(client.name for client in clients),
        notes=tuple(notes),
    )
    return with_sorted_names(trace)


def typical_start_s(clients: list[Client], window_s: float) -> float:
    """Start of the span of `window_s` in which all clients together ask nearest to their average.

    The busiest span would be one client's job: it would say little about the others.
    """
    starts = np.unique(np.concatenate([client.start_s for client in clients]))
    width = min(client.window_s for client in clients)
    total = np.zeros(len(starts))
    for client in clients:
        total[np.searchsorted(starts, client.start_s)] += client.rate_per_s * client.window_s
    span = min(max(1, round(window_s / width)), len(starts))
    summed = np.r_[0.0, np.cumsum(total)]
    asked = summed[span:] - summed[:-span]
    active = asked > 0
    if not active.any():
        return float(starts[0])
    off = np.where(active, np.abs(asked - asked[active].mean()), np.inf)
    return float(starts[np.argmin(off)])


def _overlaps(
    client: Client, start_s: float, end_s: float
) -> tuple[LongArray, FloatArray, FloatArray]:
    first = np.maximum(client.start_s, start_s)
    last = np.minimum(client.start_s + client.window_s, end_s)
    windows = np.flatnonzero((last > first) & (client.rate_per_s > 0))
    return windows, first[windows], last[windows]


def _expected(client: Client, start_s: float, end_s: float) -> float:
    windows, first, last = _overlaps(client, start_s, end_s)
    return float(np.sum(client.rate_per_s[windows] * (last - first)))


def client_arrivals(
    client: Client, start_s: float, end_s: float, scale: float, rng: np.random.Generator
) -> FloatArray:
    """Arrival times of one client in [start_s, end_s), seconds of the record.

    In each window as many inter-arrivals are drawn as its scaled rate asks for, and stretched
    together to fill it: the rate is met and their burstiness kept.
    """
    pieces = [np.zeros(0)]
    for window, first, last in zip(*_overlaps(client, start_s, end_s), strict=True):
        expected = client.rate_per_s[window] * scale * (last - first)
        count = int(expected) + int(rng.random() < expected - int(expected))
        draw = rng.weibull if client.weibull[window] else rng.standard_gamma
        gaps = draw(client.shape[window], count)
        total = float(gaps.sum())
        if count and np.isfinite(total) and total > 0:
            # A random point on the circle of gaps starts the window, so that it may begin and end
            # inside a burst.
            turned = np.cumsum(gaps) / total + rng.random()
            pieces.append(first + (turned % 1.0) * (last - first))
        elif count:
            pieces.append(rng.uniform(first, last, count))
    return np.sort(np.concatenate(pieces))


def _draw_lengths(
    client: Client, times_s: FloatArray, rng: np.random.Generator
) -> tuple[LongArray, LongArray]:
    prompt = "text_tokens" if client.shows_media else "input_tokens"
    starts, window = windows_of(client, times_s)
    drawn = np.ones((2, len(times_s)), np.int64)
    for number in np.unique(window):
        rows = np.flatnonzero(window == number)
        for column, key in enumerate((prompt, "output_tokens")):
            table = nearest_table(client, starts, int(number), key)
            drawn[column, rows] = picked(table, len(rows), rng)
    return drawn[0], drawn[1]

"""Read the BurstGPT traces, all releases: columns are found by name.

Its session ids are left out: no answer's end and no shared prefix is recorded with them.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt

from trimtab.engine_bridge.errors import TraceError
from trimtab.engine_bridge.trace import Trace
from trimtab.training.traces.assemble import Column, build_sorted
from trimtab.training.traces.options import Label, ReadOptions
from trimtab.training.traces.table import LONGEST_S, read_chunks

COLUMNS = ("Timestamp", "Request tokens", "Response tokens")


def read_burstgpt(
    path: Path, rng: np.random.Generator, label: Label, options: ReadOptions
) -> Trace:
    """Read one CSV file; times count from its earliest row.

    Rows with 0 tokens are failed requests and left out. Stamps are whole seconds: requests with the
    same stamp are spread over their second.

    Args:
        path: File, plain or gzip.
        rng: Where in its second a request arrives.
        label: Tier and tenant of every row.
        options: Not used.

    Raises:
        TraceError: a cell is not what its column says, or every request failed.
    """
    stamp = Column(np.float64)
    prompt, output = Column(np.int32), Column(np.int32)
    rows = 0
    for chunk in read_chunks(path, wanted=COLUMNS):
        stamps = chunk.numbers("Timestamp", low=0, high=LONGEST_S)
        prompts = chunk.integers("Request tokens", low=0)
        outputs = chunk.integers("Response tokens", low=0)
        served = (prompts > 0) & (outputs > 0)
        stamp.extend(stamps[served])
        prompt.extend(prompts[served])
        output.extend(outputs[served])
        rows += len(chunk)
    if not len(stamp):
        raise TraceError(path.name, value=f"{rows} rows of 0 tokens", bound="one that was served")
    notes = []
    if rows > len(stamp):
        notes.append(f"{path.name}: {rows - len(stamp):,} failed requests (0 tokens) left out.")
    times: npt.NDArray[np.float64] = stamp.finish()
    times -= times.min()
    if np.all(times == np.floor(times)):
        ties = len(times) - len(np.unique(times))
        times = spread_ties(times, 1.0, rng)
        if ties:
            notes.append(f"{path.name}: {ties:,} ties of whole seconds spread over their second.")
    return build_sorted(
        path.name,
        arrival_s=times,
        prompt_tokens=prompt.finish(),
        output_tokens=output.finish(),
        tier_names=(label.tier,),
        tenant_names=(label.tenant,),
        notes=tuple(notes),
    )


def spread_ties(
    times_s: npt.NDArray[np.float64], width_s: float, rng: np.random.Generator
) -> npt.NDArray[np.float64]:
    """Spread requests of one stamp uniformly over `width_s`, keeping their order in the file.

    A stamp with one request stays where it is.

    Args:
        times_s: Stamps, seconds, shape (n,).
        width_s: What one stamp stands for, seconds.
        rng: Source of the places.
    """
    _, group, count = np.unique(times_s, return_inverse=True, return_counts=True)
    group = group.reshape(-1)
    shift = rng.uniform(0.0, width_s, len(times_s))
    # Sorting the shifts inside each stamp keeps the file's order within it.
    by_shift = np.lexsort((shift, group))
    by_row = np.lexsort((np.arange(len(times_s)), group))
    ordered = np.empty_like(shift)
    ordered[by_row] = shift[by_shift]
    return times_s + np.where(count[group] > 1, ordered, 0.0)

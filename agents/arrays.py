"""The numbers of a bundle, policy.npz: float32 arrays by name, read without pickle.

What they mean is the manifest's business.
"""

from __future__ import annotations

import io
import math
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from trimtab.agents.manifest import read_bounded
from trimtab.engine_bridge.errors import BundleError

Float32Array = npt.NDArray[np.float32]

MOST_BYTES: Final = 16 << 20
"""Largest policy.npz, bytes."""
_MOST_HEADER_BYTES: Final = 1024
_TRAIN_AGAIN: Final = "write the bundle again"


def read_arrays(path: Path, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Float32Array]:
    """Read the arrays that a manifest asks for, and no others.

    Args:
        path: policy.npz.
        shapes: Shape by name.

    Raises:
        BundleError: the file is missing, too large or broken, an array is missing, of another
            shape or type, or holds what is no finite number.
    """
    where = str(path)
    content = read_bounded(path, MOST_BYTES)
    try:
        _check_members(where, content, shapes)
        with np.load(io.BytesIO(content), allow_pickle=False) as arrays:
            found = {name: arrays[name] for name in shapes}
    except (OSError, ValueError, EOFError, MemoryError, SyntaxError, zipfile.BadZipFile) as fault:
        raise BundleError(
            where, value=str(fault), bound="arrays of numbers", remedy=_TRAIN_AGAIN
        ) from None
    for name, array in found.items():
        check_array(where, name, array, shapes[name])
    return found


def write_arrays(path: Path, arrays: Mapping[str, Float32Array]) -> None:
    """Write arrays as an npz, the same bytes for the same arrays."""
    with zipfile.ZipFile(path, "w") as archive:
        for name, array in arrays.items():
            # A member made by name alone has a fixed date.
            with archive.open(zipfile.ZipInfo(f"{name}.npy"), "w") as member:
                np.save(member, array, allow_pickle=False)


def check_array(where: str, name: str, array: object, shape: tuple[int, ...]) -> None:
    """Refuse an array that is not of float32, of that shape and finite.

    Raises:
        BundleError: it is not.
    """
    if not isinstance(array, np.ndarray) or array.dtype != np.dtype("<f4"):
        kind = str(getattr(array, "dtype", type(array).__name__))
        raise BundleError(where, key=name, value=kind, bound="float32")
    if array.shape != shape:
        raise BundleError(where, key=f"{name}.shape", value=array.shape, bound=str(shape))
    wrong = np.argwhere(~np.isfinite(array))
    if len(wrong):
        at = tuple(int(place) for place in wrong[0])
        raise BundleError(
            where,
            key=f"{name}[{', '.join(map(str, at))}]",
            value=float(array[at]),
            bound="a finite number",
            remedy="train again",
        )


def _check_members(where: str, content: bytes, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Look at names and sizes before anything is unpacked, as a small file can hold a huge one."""
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        sizes = {member.filename: member.file_size for member in archive.infolist()}
    expected = {f"{name}.npy": math.prod(shape) * 4 for name, shape in shapes.items()}
    if set(sizes) != set(expected):
        raise BundleError(
            where,
            key="arrays",
            value=", ".join(sorted(sizes)),
            bound=", ".join(sorted(expected)),
            remedy=_TRAIN_AGAIN,
        )
    for name, size in sizes.items():
        if size > expected[name] + _MOST_HEADER_BYTES:
            raise BundleError(
                where,
                key=name,
                value=f"{size:,} bytes",
                bound=f"at most {expected[name] + _MOST_HEADER_BYTES:,} bytes",
                remedy=_TRAIN_AGAIN,
            )

"""The log of an engine's requests, one row a request at its end, in Trimtab's own trace form.

`trimtab trace info` and `trimtab whatif --trace` read its folder. It holds no prompt, no answer, no
key, and no hash of content that an outsider could check a guess against: prefix ids and the
contents of media are keyed hashes whose secret never leaves the folder (docs/metrics.md).
"""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import pyarrow as pa

from trimtab.engine_bridge.vllm.rotating_parquet import (
    Limits,
    LogFolderError,
    RotatingParquet,
    json_metadata,
    write_parquet,
)

METADATA_KEY: Final = b"trimtab.traffic"
"""Key of a file's metadata: schema, engine, plan_digest, origin_unix_s, dropped_rows, as JSON."""
SECRET_FILE: Final = ".prefix-secret"
"""Key of the prefix ids, beside the files, for this user alone."""
OUTCOMES: Final = ("finished", "refused", "shed", "cancelled", "failed")
"""What can become of a request; a closed set, fit for a metric's label."""

NO_TENANT: Final = "default"
"""Tenant of a request that names none."""

_SECRET_BYTES: Final = 32
_ID_BYTES: Final = 8
_ID_MASK: Final = 2**63 - 1
_MEDIA: Final = b"media"
"""Sets the hashes of media apart from those of blocks."""
_HASHES_A_PAUSE: Final = 256
_PAUSE_S: Final = 0.0005
_SCHEMA: Final = pa.schema(
    [
        ("arrival_s", pa.float64()),
        ("tenant", pa.string()),
        ("tier", pa.string()),
        ("prompt_tokens", pa.int32()),
        ("output_tokens", pa.int32()),
        ("prefix_ids", pa.list_(pa.int64())),
        ("prefix_block_tokens", pa.int32()),
        ("cancel_after_s", pa.float64()),
        ("stop_reason", pa.string()),
        ("media", pa.list_(pa.string())),
        ("cached_tokens", pa.int32()),
        ("frontend_s", pa.float64()),
        ("ttft_s", pa.float64()),
        ("e2e_s", pa.float64()),
        ("outcome", pa.string()),
        ("preemptions", pa.int32()),
    ]
)
_PREFIX_AT: Final = _SCHEMA.names.index("prefix_ids")
_MEDIA_AT: Final = _SCHEMA.names.index("media")

Row = tuple[Any, ...]


class Item(NamedTuple):
    """An image, a clip of audio or a video of a request."""

    kind: str
    """One of `MEDIA_KINDS`."""
    start_tokens: int
    """Prompt tokens before its first one."""
    tokens: int
    """Prompt tokens that it takes."""
    identifier: str
    """The engine's hash of what it shows; kept in memory only."""


class _Requests:
    """Rows that become one file; the hashes in them are turned into ids by the writer's thread."""

    def __init__(
        self,
        rows: list[Row],
        ids: Callable[[bytes, int], list[int]],
        items: Callable[[Sequence[Item]], list[str]],
        metadata: Callable[[], dict[bytes, bytes]],
    ) -> None:
        self._rows, self._ids, self._items, self._metadata = rows, ids, items, metadata

    def __len__(self) -> int:
        return len(self._rows)

    def table(self) -> pa.Table:
        columns: list[list[Any]] = [list(column) for column in zip(*self._rows, strict=True)]
        columns[_PREFIX_AT] = [self._ids(*packed) for packed in columns[_PREFIX_AT]]
        columns[_MEDIA_AT] = [self._items(items) for items in columns[_MEDIA_AT]]
        arrays = [
            pa.array(column, field.type) for column, field in zip(columns, _SCHEMA, strict=True)
        ]
        table = pa.Table.from_arrays(arrays, schema=_SCHEMA)
        return table.replace_schema_metadata(self._metadata())


class TrafficLog:
    """Collects ended requests and hands full buffers to a writer.

    One thread may call `add` and `close`; any may call `flush` and `flush_counted`.
    """

    def __init__(
        self,
        folder: Path | str,
        *,
        engine: str,
        plan_digest: str,
        origin_unix_s: float | None = None,
        rows_per_file: int = 1024,
        hash_bytes_per_file: int = 16 << 20,
        longest_s: float = 300.0,
        limits: Limits | None = None,
        write: Callable[[pa.Table, Path], None] = write_parquet,
        pause: Callable[[float], None] = time.sleep,
    ) -> None:
        """Begin a log.

        Args:
            folder: Where the files go, `traffic-*.parquet`, and the secret of the prefix ids.
            engine: Name of the engine, for the files' metadata.
            plan_digest: `Plan.digest`, for the files' metadata.
            origin_unix_s: Wall time at which `arrival_s` is 0, seconds since 1970; None: now.
            rows_per_file: Most requests in a file; so many are lost at most when the engine dies.
            hash_bytes_per_file: Most bytes of block hashes that a buffer keeps in memory.
            longest_s: A file is written at the latest with the first end this long after the
                buffer's first.
            limits: How much may be kept; None: 256 files, 1 GiB.
            write: Writes one table to one path.
            pause: Sleeps; the writer gives the interpreter's lock back between ids.

        Raises:
            LogFolderError: the folder cannot be written to, or its secret is damaged.
        """
        self._facts = {
            "schema": 1,
            "engine": engine,
            "plan_digest": plan_digest,
            "origin_unix_s": time.time() if origin_unix_s is None else origin_unix_s,
        }
        self._most_rows, self._most_bytes = rows_per_file, hash_bytes_per_file
        self._longest_s, self._pause = longest_s, pause
        self._out = RotatingParquet(Path(folder), "traffic", limits=limits, write=write)
        self._secret = _secret(Path(folder) / SECRET_FILE)
        # Held for microseconds: a flush that another thread asks for must lose no row.
        self._lock = threading.Lock()
        self._rows: list[Row] = []
        self._bytes = self._handed_over = 0
        self._ends_s = 0.0

    @property
    def dropped_rows(self) -> int:
        """Requests lost since the start, because the disk was slow or full."""
        return self._out.dropped_rows

    @property
    def written_rows(self) -> int:
        """Requests in files since the start."""
        return self._out.written_rows

    def add(
        self,
        *,
        arrival_s: float,
        tenant: str,
        tier: str,
        prompt_tokens: int,
        output_tokens: int,
        block_hashes: Sequence[bytes] = (),
        prefix_block_tokens: int = 0,
        cached_tokens: int = 0,
        frontend_s: float = 0.0,
        ttft_s: float | None = None,
        e2e_s: float = 0.0,
        outcome: str = "finished",
        preemptions: int = 0,
        stop_reason: str = "",
        media: Sequence[Item] = (),
    ) -> None:
        """Append one request that has ended.

        Args:
            arrival_s: Arrival, seconds from the log's origin.
            tenant: Its tenant; empty: `NO_TENANT`.
            tier: Its tier.
            prompt_tokens: Length of the prompt.
            output_tokens: Tokens generated. A trace has no request without an answer:
                0 becomes 1.
            block_hashes: The engine's hashes of its full blocks (all of one length), in order; they
                may go on into the answer. They are kept in memory only.
            prefix_block_tokens: Tokens that one hash covers.
            cached_tokens: Prompt tokens that the cache saved.
            frontend_s: Time from the API server's arrival to the scheduler's, seconds: reading
                the body, tokenising, the way between the processes.
            ttft_s: Time to first token, seconds; None: it never came.
            e2e_s: Time from arrival to the end, seconds.
            outcome: One of `OUTCOMES`. A cancelled request gets `cancel_after_s = e2e_s`.
            preemptions: How often it lost its place.
            stop_reason: Why it ended, as the plan's retention classes name it.
            media: Images and so on inside its prompt, in order.
        """
        prompt_tokens, output_tokens = max(1, prompt_tokens), max(1, output_tokens)
        packed, width = b"", 0
        if block_hashes and prefix_block_tokens > 0:
            # A trace's ids lie inside the request's own tokens.
            blocks = (prompt_tokens + output_tokens) // prefix_block_tokens
            packed, width = b"".join(block_hashes[:blocks]), len(block_hashes[0])
        cancel_s = max(e2e_s, 1e-6) if outcome == "cancelled" else None
        row = (
            max(0.0, arrival_s), tenant or NO_TENANT, tier, prompt_tokens, output_tokens,
            (packed, width), prefix_block_tokens if width else 0, cancel_s, stop_reason,
            media, cached_tokens, frontend_s, ttft_s, e2e_s, outcome, preemptions,
        )  # fmt: skip
        with self._lock:
            if not self._rows:
                self._ends_s = arrival_s + e2e_s + self._longest_s
            self._rows.append(row)
            self._bytes += len(packed)
            if (
                len(self._rows) >= self._most_rows
                or self._bytes >= self._most_bytes
                or arrival_s + e2e_s >= self._ends_s
            ):
                self._hand_over()

    def flush(self) -> None:
        """Hand what is there to the writer; does not wait for it."""
        with self._lock:
            self._hand_over()

    def flush_counted(self) -> dict[str, int]:
        """Flush, and count the rows handed over, written and dropped since the start."""
        with self._lock:
            self._hand_over()
            handed_over = self._handed_over
        return {
            "handed_over_rows": handed_over,
            "written_rows": self.written_rows,
            "dropped_rows": self.dropped_rows,
        }

    def _hand_over(self) -> None:
        rows, self._rows, self._bytes = self._rows, [], 0
        self._handed_over += len(rows)
        self._out.put(_Requests(rows, self._ids, self._items, self._metadata))

    def close(self, timeout_s: float = 10.0) -> None:
        """Write what is there and end the writer."""
        self._pause = _no_pause
        self.flush()
        self._out.close(timeout_s)

    def _ids(self, packed: bytes, width: int) -> list[int]:
        """Keyed hashes of the engine's hashes: BLAKE2b with a key is a MAC, cut to 63 bits."""
        ids: list[int] = []
        secret, blake2b, number = self._secret, hashlib.blake2b, int.from_bytes
        for start in range(0, len(packed), max(width, 1)):
            block = packed[start : start + width]
            digest = blake2b(block, digest_size=_ID_BYTES, key=secret).digest()
            ids.append(number(digest, "big") & _ID_MASK)
            if len(ids) % _HASHES_A_PAUSE == 0:
                # A thread that computes for long makes the engine's wait for the lock at each turn.
                self._pause(_PAUSE_S)
        if ids:
            self._pause(_PAUSE_S)
        return ids

    def _items(self, items: Sequence[Item]) -> list[str]:
        """The items as a trace names them; the keyed hash of an identifier stands for what it is.

        A client can have an identifier hashed that it chose itself: no text of it comes through.
        """
        texts = []
        for kind, start, tokens, identifier in items:
            digest = hashlib.blake2b(
                identifier.encode(), digest_size=_ID_BYTES, key=self._secret, person=_MEDIA
            ).digest()
            content = int.from_bytes(digest, "big") & _ID_MASK
            texts.append(f"{kind}:{tokens}@{start}#{content}")
        return texts

    def _metadata(self) -> dict[bytes, bytes]:
        facts = self._facts | {"dropped_rows": self._out.dropped_rows}
        return json_metadata(METADATA_KEY, facts)


def _no_pause(seconds: float) -> None:
    """At the end nobody waits for the interpreter's lock."""


def _secret(path: Path) -> bytes:
    """The folder's secret, made at the first use; engines that share the folder share it."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        temporary.unlink(missing_ok=True)
        handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(handle, "wb") as file:
            file.write(os.urandom(_SECRET_BYTES))
        try:
            # A link fails where the name is taken: two engines that start at once agree on one.
            os.link(temporary, path)
        except FileExistsError:
            pass
        finally:
            temporary.unlink()
        found = path.read_bytes()
    except OSError as error:
        raise LogFolderError(
            f"{path}: cannot be used: {error.strerror or error}",
            remedy="mend its permissions or choose another folder",
        ) from error
    if len(found) != _SECRET_BYTES:
        raise LogFolderError(
            str(path),
            value=f"{len(found)} bytes",
            bound=f"{_SECRET_BYTES} bytes",
            remedy="delete it; prefix ids then begin anew",
        )
    return found

"""The column `media` of Trimtab's own trace form: what one item is written as, and how it is read.

An item is `kind:tokens@start#content`, for instance `image:576@35#7`. It opens no files
(`canonical` and `canonical_write` do).
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from trimtab.engine_bridge.errors import TraceError, did_you_mean
from trimtab.engine_bridge.media import IMAGE, MEDIA_KINDS, MediaItems
from trimtab.training.traces.assemble import Column, Names, dense_ids, offsets_of
from trimtab.training.traces.table import MOST_TOKENS, Chunk

LongArray = npt.NDArray[np.int64]

KEY: Final = "media"
_FORM: Final = "kind:tokens, kind:tokens@start or kind:tokens@start#content"
_ITEM: Final = (
    r"^(?P<kind>[^:@#\s]*):(?P<tokens>[0-9]{1,8})"
    r"(?:@(?P<start>[0-9]{1,8}))?(?:#(?P<content>[^:@#\s]{1,128}))?$"
)
_NUMBER: Final = r"^[0-9]{1,18}$"
_NONE: Final = -1


class MediaColumn:
    """The items of a file while it streams in."""

    def __init__(self, rows: int) -> None:
        """Start empty, with room for so many rows (a hint)."""
        self._lengths = Column(np.int32, rows=rows)
        self._kind = Column(np.int32)
        self._start = Column(np.int64)
        self._tokens = Column(np.int64)
        self._content = Column(np.int64)
        self._names = Names()
        self._image_tokens: Column | None = None

    def add(self, chunk: Chunk) -> None:
        """Check and append the items of a chunk; `image_tokens` counts where there are no items.

        Raises:
            TraceError: an item is none, lies outside its prompt, or the two columns contradict
                each other.
        """
        if KEY not in chunk.columns:
            self._add_image_tokens(chunk)
            return
        lengths, texts = _lists(chunk)
        kind, tokens, start, content = self._parsed(chunk, lengths, texts)
        start = _laid_out(lengths, tokens, start)
        _check_places(chunk, lengths, texts, start, tokens)
        if "image_tokens" in chunk.columns:
            _check_image_tokens(chunk, lengths, kind, tokens)
        self._lengths.extend(lengths)
        for column, values in (
            (self._kind, kind),
            (self._tokens, tokens),
            (self._start, start),
            (self._content, content),
        ):
            column.extend(values)

    def finish(self) -> MediaItems:
        """All items, with dense content numbers.

        Numbers keep their order; names follow in the order of the file, then the items that named
        nothing, each for itself.
        """
        if self._image_tokens is not None:
            return MediaItems.one_image_each(self._image_tokens.finish().astype(np.int32))
        content = self._content.finish()
        numbered = int(content.max(initial=_NONE)) + 1
        named = content < _NONE
        content[named] = numbered - 2 - content[named]
        own = content == _NONE
        first = numbered + len(self._names.names)
        content[own] = first + np.arange(np.count_nonzero(own))
        kind, tokens = self._kind.finish(), self._tokens.finish()
        # One thing has one kind and one length: whatever a client has called equal is not.
        apart = dense_ids(content).astype(np.int64) * len(MEDIA_KINDS) + kind
        content = apart * (MOST_TOKENS + 1) + tokens
        return MediaItems(
            offsets=offsets_of(self._lengths.finish()),
            kind=kind.astype(np.int32),
            start_tokens=self._start.finish().astype(np.int32),
            tokens=tokens.astype(np.int32),
            content=dense_ids(content),
        )

    def _add_image_tokens(self, chunk: Chunk) -> None:
        if self._image_tokens is None:
            self._image_tokens = Column(np.int64)
        values = chunk.integers("image_tokens", low=0, missing=0)
        longer = values > chunk.integers("prompt_tokens", low=1)
        if longer.any():
            row = int(np.argmax(longer))
            raise TraceError(
                chunk.place(row),
                key="image_tokens",
                value=int(values[row]),
                bound="at most prompt_tokens, of which they are a part",
            )
        self._image_tokens.extend(values)

    def _parsed(
        self, chunk: Chunk, lengths: LongArray, texts: pa.Array
    ) -> tuple[LongArray, LongArray, LongArray, LongArray]:
        """Kind, tokens, start (or none) and content (a number, a name below -1, or none)."""
        parts = pc.extract_regex(texts, _ITEM)
        named = pc.struct_field(parts, "kind").dictionary_encode()
        table = np.array(
            [MEDIA_KINDS.index(text) if text in MEDIA_KINDS else _NONE
             for text in named.dictionary.to_pylist()],
            np.int64,
        )  # fmt: skip
        places = pc.fill_null(named.indices, 0).to_numpy(zero_copy_only=False)
        kind = table[places] if len(table) else np.full(len(texts), _NONE, np.int64)
        tokens = _integers(pc.struct_field(parts, "tokens"), 0)
        bad = parts.is_null().to_numpy(zero_copy_only=False) | (kind == _NONE)
        bad |= (tokens < 1) | (tokens > MOST_TOKENS)
        if bad.any():
            raise _bad_item(chunk, lengths, texts, int(np.argmax(bad)))
        return kind, tokens, _integers(pc.struct_field(parts, "start"), _NONE), self._shown(parts)

    def _shown(self, parts: pa.Array) -> LongArray:
        contents = pc.struct_field(parts, "content")
        numeric = pc.match_substring_regex(contents, _NUMBER)
        if pc.all(pc.or_(numeric, pc.equal(contents, ""))).as_py() is not False:
            return _integers(contents, _NONE)
        numbers = _integers(pc.if_else(numeric, contents, ""), _NONE)
        coded = pc.if_else(numeric, "", contents).dictionary_encode()
        table = np.array(
            [-2 - self._names.number(text) if text else _NONE
             for text in coded.dictionary.to_pylist()],
            np.int64,
        )  # fmt: skip
        names = table[coded.indices.to_numpy(zero_copy_only=False)]
        return np.where(names < _NONE, names, numbers)


def media_texts(media: MediaItems, start: int, stop: int) -> pa.Array:
    """The items of the rows from `start` to below `stop` as lists of texts, one list a row."""
    offsets = media.offsets[start : stop + 1]
    inside = slice(offsets[0], offsets[-1])
    kinds = pa.DictionaryArray.from_arrays(
        pa.array(media.kind[inside]), pa.array(MEDIA_KINDS, pa.string())
    ).dictionary_decode()
    numbers = (
        pc.cast(pa.array(column[inside]), pa.string())
        for column in (media.tokens, media.start_tokens, media.content)
    )
    tokens, starts, contents = numbers
    head = pc.binary_join_element_wise(kinds, tokens, ":")
    placed = pc.binary_join_element_wise(head, starts, "@")
    texts = pc.binary_join_element_wise(placed, contents, "#")
    return pa.LargeListArray.from_arrays(pa.array(offsets - offsets[0]), texts)


def _lists(chunk: Chunk) -> tuple[LongArray, pa.Array]:
    """Lengths of the rows' lists, and all items one after the other."""
    column = chunk.columns[KEY]
    if pa.types.is_null(column.type):
        return np.zeros(len(chunk), np.int64), pa.array([], pa.string())
    if not (pa.types.is_list(column.type) or pa.types.is_large_list(column.type)):
        texts = pc.utf8_trim_whitespace(chunk.texts(KEY))
        filled = pc.if_else(pc.equal(texts, ""), pa.scalar(None, pa.string()), texts)
        column = pc.split_pattern_regex(filled, r"\s+")
    lengths = pc.fill_null(pc.list_value_length(column), 0).to_numpy(zero_copy_only=False)
    try:
        flat = pc.fill_null(pc.cast(column.flatten(), pa.string()), "")
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
        raise TraceError(
            chunk.file, key=KEY, value=str(column.type), bound=f"lists of texts {_FORM}"
        ) from None
    return lengths.astype(np.int64), flat


def _integers(texts: pa.Array, missing: int) -> LongArray:
    """Whole numbers of texts of digits; the empty and the missing ones as `missing`."""
    empty = pc.fill_null(pc.equal(texts, ""), True)
    filled = pc.if_else(empty, str(missing), texts)
    values: LongArray = pc.cast(filled, pa.int64()).to_numpy(zero_copy_only=False)
    return values


def _laid_out(lengths: LongArray, tokens: LongArray, start: LongArray) -> LongArray:
    """Where each item begins: as given, or where the one before it in its row ends, or at 0."""
    before = np.cumsum(tokens) - tokens
    first = np.repeat(np.cumsum(lengths) - lengths, lengths)
    anchor = np.where(start == _NONE, 0, np.arange(len(start)) + 1)
    anchor = np.maximum(np.maximum.accumulate(anchor) - 1, first) if len(start) else anchor
    base = np.where(start[anchor] == _NONE, 0, start[anchor])
    placed: LongArray = base + before - before[anchor]
    return placed


def _check_places(
    chunk: Chunk, lengths: LongArray, texts: pa.Array, start: LongArray, tokens: LongArray
) -> None:
    prompt = chunk.integers("prompt_tokens", low=1)
    row = np.repeat(np.arange(len(lengths)), lengths)
    end = start + tokens
    over = np.zeros(len(row), np.bool_)
    over[1:] = (row[1:] == row[:-1]) & (start[1:] < end[:-1])
    for bad, bound in (
        (end > prompt[row], "an item that ends inside the prompt"),
        (over, "items in the order of the prompt, none over another"),
    ):
        if bad.any():
            at = int(np.argmax(bad))
            raise TraceError(
                chunk.place(int(row[at])),
                key=KEY,
                value=f"{texts[at].as_py()} in a prompt of {prompt[row[at]]} tokens",
                bound=bound,
                remedy="media count in prompt_tokens",
            )


def _check_image_tokens(
    chunk: Chunk, lengths: LongArray, kind: LongArray, tokens: LongArray
) -> None:
    row = np.repeat(np.arange(len(lengths)), lengths)
    images = kind == IMAGE
    sums = np.bincount(row[images], weights=tokens[images], minlength=len(lengths))
    said = chunk.integers("image_tokens", low=0, missing=_NONE)
    bad = (said != _NONE) & (said != sums)
    if bad.any():
        at = int(np.argmax(bad))
        raise TraceError(
            chunk.place(at),
            key="image_tokens",
            value=int(said[at]),
            bound=f"{int(sums[at])}, the tokens of the images in {KEY}",
            remedy=f"leave out image_tokens: {KEY} says the same",
        )


def _bad_item(chunk: Chunk, lengths: LongArray, texts: pa.Array, at: int) -> TraceError:
    row = int(np.repeat(np.arange(len(lengths)), lengths)[at])
    text = texts[at].as_py()
    kind, colon, _ = text.partition(":")
    if colon and kind not in MEDIA_KINDS:
        bound = f"a kind of {', '.join(MEDIA_KINDS)}"
        hint = did_you_mean(kind, MEDIA_KINDS)
    else:
        bound = f"{_FORM}, with 1 to {MOST_TOKENS:,} tokens"
        hint = "for instance image:576@35#7"
    return TraceError(chunk.place(row), key=KEY, value=text[:60], bound=bound, remedy=hint)

"""The model of an emulated engine: a folder with a configuration and a tokenizer, no weights.

vLLM needs one to read limits from, to turn text into tokens and back. The tokenizer is byte-level
BPE whose longer tokens are words of two syllables ("bako", " mire"): any text can be encoded, a
word of the vocabulary is one token, and an answer made of such words encodes to the same tokens
again, so that a conversation's next turn finds the last one in the prefix cache.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import tempfile
from pathlib import Path
from typing import Any, Final

MAX_MODEL_LEN: Final = 131_072
"""Longest prompt and answer together, tokens."""

_SPECIALS: Final = ("<|end|>", "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>")
_END: Final = 0
_CONSONANTS: Final = "bdfgklmnprstvz"
_VOWELS: Final = "aeiou"
_SYLLABLES: Final = tuple(c + v for c in _CONSONANTS for v in _VOWELS)
_WORDS: Final = tuple(first + last for first in _SYLLABLES for last in _SYLLABLES)
_SPACE: Final = "\u0120"  # how byte-level BPE writes a space
_FIRST_SPACED: Final = len(_SPECIALS) + 256 + len(_SYLLABLES) + len(_WORDS)

ANSWER_TOKENS: Final = range(_FIRST_SPACED, _FIRST_SPACED + len(_WORDS))
"""Ids of the tokens that answers consist of: the words with a space before them."""

_CHAT_TEMPLATE: Final = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' + (message['content'] or '')"
    " + '<|end|>' }}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def model_folder(cache: Path | None = None) -> Path:
    """The folder for vLLM's `--model`; made once, then found again.

    Args:
        cache: Where to keep it; None: `trimtab` in the user's cache folder.
    """
    files = {
        "config.json": _config(),
        "tokenizer.json": _tokenizer(),
        "tokenizer_config.json": _tokenizer_config(),
    }
    texts = {name: json.dumps(content, ensure_ascii=False) for name, content in files.items()}
    digest = hashlib.sha256("\0".join(texts.values()).encode()).hexdigest()[:16]
    folder = (cache or _user_cache()) / f"emulated-model-{digest}"
    if not folder.is_dir():
        _write(folder, texts)
    return folder


def _write(folder: Path, texts: dict[str, str]) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as made:
        new = Path(made) / "model"
        new.mkdir()
        for name, text in texts.items():
            (new / name).write_text(text, encoding="utf-8")
        try:
            new.rename(folder)
        except OSError:
            # Another process was faster; equal names have equal content.
            if not folder.is_dir():
                raise


def _user_cache() -> Path:
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "trimtab"


def _config() -> dict[str, Any]:
    # Sizes are as small as they may be: nothing is ever computed with them.
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "num_hidden_layers": 1,
        "max_position_embeddings": MAX_MODEL_LEN,
        "vocab_size": ANSWER_TOKENS.stop,
        "bos_token_id": None,
        "eos_token_id": _END,
        "dtype": "bfloat16",
    }


def _tokenizer_config() -> dict[str, Any]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": _SPECIALS[_END],
        "pad_token": _SPECIALS[_END],
        "model_max_length": MAX_MODEL_LEN,
        "clean_up_tokenization_spaces": False,
        "chat_template": _CHAT_TEMPLATE,
    }


def _tokenizer() -> dict[str, Any]:
    words = [list(pair) for pair in itertools.product(_SYLLABLES, repeat=2)]
    merges = [list(syllable) for syllable in _SYLLABLES]
    merges += words
    merges += [[_SPACE, word] for word in _WORDS]
    pieces = (*_byte_letters(), *_SYLLABLES, *_WORDS, *(_SPACE + word for word in _WORDS))
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [_added(number, text) for number, text in enumerate(_SPECIALS)],
        "normalizer": None,
        "pre_tokenizer": {**byte_level, "use_regex": True},
        "post_processor": None,
        "decoder": {**byte_level, "use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {piece: number for number, piece in enumerate((*_SPECIALS, *pieces))},
            "merges": merges,
        },
    }


def _added(number: int, text: str) -> dict[str, Any]:
    return {
        "id": number,
        "content": text,
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "special": True,
    }


def _byte_letters() -> list[str]:
    """The letter that stands for each byte in byte-level BPE (Radford et al., 2019)."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = itertools.count(0x100)
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]

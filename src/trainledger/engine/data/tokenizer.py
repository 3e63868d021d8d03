"""Tokenizers: bytes, byte-level BPE trained on the corpus, any tokenizer.json.

A tokenizer is named by the SHA-256 of its definition, so that tokens are never read with another one.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from trainledger.spec.durable import content_of, parse_json
from trainledger.spec.problem import InvalidInput, Problem

Ids = npt.NDArray[np.uint32]
END_TOKENS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>")
# Names of other tokens that say that a text, a turn or a part ends, the likeliest first.
_ENDS = ("eos|end_?of_?(text|sentence|document|seq)|^</s>$", "eot|eod|im_end|end_?of|(?<![a-z])end(?![a-z])", "sep")
BYTE_VALUES = 256
ENCODED_AT_ONCE = 2**18  # characters
LARGEST_ID = 10**8 - 1  # as model.vocab_size
SAMPLE = "A tokenizer's first words: 1 + 1 = 2; \u00e9\u4e16\U0001f600.\n\tx\0"  # what it must be able to encode


@dataclass(frozen=True)
class ByteTokenizer:
    """A token is a byte of UTF-8; one more token, 256, ends a document.

    >>> tokenizer = ByteTokenizer()
    >>> tokenizer.encode(["né"])[0].tolist(), tokenizer.vocab_size
    ([110, 195, 169], 257)
    >>> tokenizer.decode([110, 195, 169, 256])
    'né<|endoftext|>'
    """

    name: ClassVar[str] = "bytes"
    vocab_size: ClassVar[int] = BYTE_VALUES + 1
    end_id: ClassVar[int] = BYTE_VALUES
    unknown_id: ClassVar[None] = None

    @property
    def definition(self) -> str:
        return json.dumps({"bytes": {"end_id": self.end_id}})

    @property
    def fingerprint(self) -> str:
        return _fingerprint(self.definition)

    def encode(self, texts: list[str]) -> list[Ids]:
        """The tokens of each text, without an end."""
        return [np.frombuffer(text.encode(), dtype=np.uint8).astype(np.uint32) for text in texts]

    def decode(self, ids: Iterable[int]) -> str:
        """The text of tokens; bytes that are no UTF-8 become U+FFFD."""
        text = b"".join(END_TOKENS[0].encode() if each == self.end_id else bytes([each]) for each in ids)
        return text.decode(errors="replace")


@dataclass(frozen=True)
class JsonTokenizer:
    """The tokenizer of a tokenizer.json's text, run by the `tokenizers` package."""

    name: str
    definition: str
    end_id: int

    @cached_property
    def _engine(self) -> Any:
        with _refused(self.name, "is not a tokenizer"):
            engine = _engine_of(self.definition)
        # A document that spells out <|endoftext|> gets the letters, not the token.
        engine.encode_special_tokens = True
        return engine

    @cached_property
    def unknown_id(self) -> int | None:
        """The token in place of text that the vocabulary cannot spell; None where there is no such token."""
        model = json.loads(self.definition).get("model", {})
        token = model.get("unk_token")
        found: int | None = model.get("unk_id") if token is None else self._engine.token_to_id(token)
        return found

    @cached_property
    def vocab_size(self) -> int:
        """One more than the largest token id."""
        return 1 + int(max(self._engine.get_vocab(with_added_tokens=True).values()))

    @property
    def fingerprint(self) -> str:
        return _fingerprint(f"{self.definition} {self.end_id}")

    def encode(self, texts: list[str]) -> list[Ids]:
        """The tokens of each text, without an end; a text over 262,144 characters is encoded in parts that end
        at a line end, because an encoding takes some hundred bytes of memory per token."""
        short = iter(self._encode_together([text for text in texts if len(text) <= ENCODED_AT_ONCE]))
        return [
            next(short)
            if len(text) <= ENCODED_AT_ONCE
            else np.concatenate([self._encode_together([part])[0] for part in _parts(text)])
            for text in texts
        ]

    def _encode_together(self, texts: list[str]) -> list[Ids]:
        engine = self._engine
        with _refused(self.name, "cannot encode this corpus"):
            encodings = engine.encode_batch_fast(texts, add_special_tokens=False)
        return [np.array(encoding.ids, dtype=np.uint32) for encoding in encodings]

    def decode(self, ids: Iterable[int]) -> str:
        """The text of tokens, special tokens included."""
        engine = self._engine
        with _refused(self.name, "cannot decode these tokens"):
            return str(engine.decode(list(ids), skip_special_tokens=False))


Tokenizer = ByteTokenizer | JsonTokenizer


def chat_text(turns: list[Any]) -> str | None:
    """A conversation as one text, in ChatML's markers; None for a list of anything else.

    Turns are ``role`` and ``content`` (OpenAI, TRL) or ``from`` and ``value`` (ShareGPT). Models with markers of their
    own need their template's text instead.

    >>> chat_text([{"role": "user", "content": "2 + 2?"}, {"from": "gpt", "value": "4"}])
    '<|im_start|>user\\n2 + 2?<|im_end|>\\n<|im_start|>assistant\\n4<|im_end|>\\n'
    """
    text = ""
    for turn in turns:
        given = turn if isinstance(turn, dict) else {}
        role, content = given.get("role", given.get("from")), given.get("content", given.get("value"))
        if not isinstance(role, str) or not isinstance(content, str):
            return None
        text += f"<|im_start|>{_ROLES.get(role, role)}\n{content}<|im_end|>\n"
    return text


_ROLES = {"human": "user", "gpt": "assistant"}  # of ShareGPT


def train_bpe(texts: Iterable[str], vocab_size: int) -> str:
    """The tokenizer.json of a byte-level BPE with at most ``vocab_size`` tokens, <|endoftext|> the first.

    The same texts in the same order give the same definition.
    """
    tokenizers = _tokenizers()
    engine = tokenizers.Tokenizer(tokenizers.models.BPE())
    engine.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    engine.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_TOKENS[0]],
        initial_alphabet=sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    engine.train_from_iterator(texts, trainer)
    return _canonical(engine.to_str())


def read_tokenizer(path: str, end_token: str | None) -> JsonTokenizer:
    """The tokenizer of a tokenizer.json, or of a directory that holds one.

    Raises InvalidInput where there is no such file, it is no tokenizer, or it lacks the end-of-document token.
    """
    file = Path(path).expanduser()
    if file.is_dir():
        file = file / "tokenizer.json"
    try:
        definition = _canonical(content_of(file))
    except (OSError, ValueError) as error:
        why = f"({error.strerror})" if isinstance(error, OSError) else f"is not JSON ({error})"
        rule = f'is neither "bytes" nor "bpe" nor a tokenizer.json that can be read: {file} {why}'
        raise InvalidInput([Problem("data.tokenizer", path, rule, '"bytes"')]) from None
    return json_tokenizer(path, definition, end_token, _eos_beside(file))


def _eos_beside(file: Path) -> str | None:
    """The eos_token that a tokenizer_config.json in the same directory names."""
    try:
        eos = json.loads(file.with_name("tokenizer_config.json").read_text(encoding="utf-8")).get("eos_token")
    except (OSError, ValueError, AttributeError, RecursionError):
        return None
    eos = eos.get("content") if isinstance(eos, dict) else eos
    return eos if isinstance(eos, str) else None


def json_tokenizer(name: str, definition: str, end_token: str | None = None, eos: str | None = None) -> JsonTokenizer:
    """The tokenizer of a definition, with the token that ends its documents found; ``eos`` is proposed for it."""
    with _refused(name, "is not a tokenizer"):
        engine = _engine_of(definition)
        vocabulary = engine.get_vocab(with_added_tokens=True)
        engine.encode_batch_fast([SAMPLE], add_special_tokens=False)
    largest = max(vocabulary.values(), default=-1)
    if not 0 <= largest <= LARGEST_ID:
        rule = f"has {largest:,} as its largest token id, and at most {LARGEST_ID:,} works"
        if not vocabulary:
            rule = "has no tokens"
        raise InvalidInput([Problem("data.tokenizer", name, rule, '"bytes"')])
    tokens = engine.get_added_tokens_decoder().values()
    special = {each.content for each in tokens if each.special}
    # A word of the vocabulary that looks like an end comes after a special token.
    wanted = sorted(END_TOKENS, key=lambda each: each not in special) if end_token is None else [end_token]
    for token in wanted:
        end_id = engine.token_to_id(token)
        if end_id is not None:
            return JsonTokenizer(name, definition, end_id)
    added = sorted((each.content for each in tokens), key=lambda each: (each not in special, each))
    rule = f"is not a token of {name}, whose added tokens are {', '.join(added[:20]) or 'none'}"
    value = end_token if end_token is not None else " or ".join(END_TOKENS)
    raise InvalidInput([Problem("data.end_token", value, rule, eos if eos in vocabulary else _likeliest_end(added))])


def _likeliest_end(tokens: list[str]) -> str | None:
    """The token whose name says that something ends.

    >>> _likeliest_end(["[CLS]", "[PAD]", "[SEP]"]), _likeliest_end(["<|begin_of_text|>", "<|end_of_turn|>"])
    ('[SEP]', '<|end_of_turn|>')
    """
    plain = [token.lower().replace("\u2581", "_").replace(" ", "_") for token in tokens]
    found = (token for end in _ENDS for token, name in zip(tokens, plain, strict=True) if re.search(end, name))
    return next(found, None)


@contextmanager
def _refused(name: str, rule: str) -> Iterator[None]:
    """Say in a sentence what the tokenizers package refuses.

    It raises plain Exception, and where its own code panics a BaseException of a class that it does not export.
    """
    try:
        yield
    except InvalidInput:
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        reason = " ".join(str(error).split())[:200]
        raise InvalidInput([Problem("data.tokenizer", name, f"{rule}: {reason}", '"bytes"')]) from None


def _engine_of(definition: str) -> Any:
    return _tokenizers().Tokenizer.from_str(definition)


def _tokenizers() -> Any:
    try:
        import tokenizers
    except ImportError:
        rule = "needs the package tokenizers, which is not installed"
        raise InvalidInput([Problem("data.tokenizer", "bpe", rule, '"bytes"')]) from None
    return tokenizers


def _canonical(definition: str) -> str:
    """A tokenizer.json as one line without truncation and padding, which are no part of a vocabulary."""
    fields = parse_json(definition)
    if not isinstance(fields, dict):
        raise ValueError("it holds no object")
    return json.dumps(fields | {"truncation": None, "padding": None}, ensure_ascii=False, separators=(",", ":"))


def _parts(text: str) -> list[str]:
    parts = []
    start = 0
    while len(text) - start > ENCODED_AT_ONCE:
        stop = text.rfind("\n", start, start + ENCODED_AT_ONCE) + 1
        if stop <= start:
            stop = start + ENCODED_AT_ONCE
        parts.append(text[start:stop])
        start = stop
    return [*parts, text[start:]]


def _fingerprint(definition: str) -> str:
    return hashlib.sha256(definition.encode()).hexdigest()


def byte_level(tokenizer: ByteTokenizer) -> str:
    """The tokenizer.json of bytes: a byte-level BPE without merges, whose ids are the bytes."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    # Byte-level BPE writes each byte as one visible character (Radford et al. 2019): itself, or the next from 256 on.
    rest = [index for index in range(256) if index not in printable]
    letters = {byte: chr(byte) for byte in printable} | {byte: chr(256 + at) for at, byte in enumerate(rest)}
    end_token = tokenizer.decode([tokenizer.end_id])
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    bytes_to_letters = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return json.dumps(
        {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "normalizer": None,
            "post_processor": None,
            "added_tokens": [{"id": tokenizer.end_id, "content": end_token, "special": True, **flags}],
            "pre_tokenizer": bytes_to_letters,
            "decoder": bytes_to_letters,
            "model": {
                "type": "BPE",
                "dropout": None,
                "unk_token": None,
                "continuing_subword_prefix": None,
                "end_of_word_suffix": None,
                "fuse_unk": False,
                "byte_fallback": False,
                "ignore_merges": False,
                "vocab": {letters[byte]: byte for byte in range(256)},
                "merges": [],
            },
        }
    )

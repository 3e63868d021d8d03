"""Pairs of answers to a prompt, as batches: records with the fields ``prompt``, ``chosen`` and ``rejected``.

A row is an end token, the prompt, one answer and an end token, cut off at seq_len tokens after the first, or filled up.
Targets of the prompt and of what fills up are `IGNORED`. The rows of a pair are neighbours, the chosen answer first.

Shapes: B rows of a micro-batch, T = seq_len.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from trainledger.engine.data.corpus import Corpus, find_corpus, identify, plan_shards
from trainledger.engine.data.documents import Document, documents, held_out
from trainledger.engine.data.files import problem_of_writing
from trainledger.engine.data.mixture import sequences_of_step
from trainledger.engine.data.tokenizer import ByteTokenizer, Ids, Tokenizer, read_tokenizer
from trainledger.spec.problem import InvalidInput, Problem
from trainledger.spec.run import DataSpec, Run
from trainledger.spec.runfile import vocabulary_problem
from trainledger.spec.units import ceil_div

PROMPT, ANSWERS = "prompt", ("chosen", "rejected")
IGNORED = -100

Losses = Callable[[Tensor, Tensor], Tensor]  # inputs_BT and targets_BT to the summed loss of each row
Together = Callable[[Callable[[], list[list[float]]]], list[list[list[float]]]]  # of every rank, by rank


@dataclass(frozen=True)
class Pair:
    """The tokens of both rows of a pair, where their answers begin, and the place of the record."""

    rows: tuple[tuple[Ids, int], ...]
    place: str


class Pairs:
    """The batches of a run on preferences: a `train.step.Feed` whose text is in memory.

    ``rank`` of ``ranks`` gets its pairs of every global batch.
    """

    unigram_entropy = None
    shares: Mapping[str, float] = {"": 1.0}

    def __init__(self, run: Run, tokenizer: Tokenizer, corpus: Corpus, pairs: Sequence[Pair], held: Sequence[Pair],
                 device: torch.device | str, remarks: Sequence[str], rank: int, ranks: int) -> None:  # fmt: skip
        self.recipe, self.micro_batch = run.recipe, run.device_batch
        self.train, self.held_out = tuple(pairs), tuple(held)
        self.device, self.remarks = torch.device(device), remarks
        self.rank, self.ranks = rank, ranks
        self.end_id = tokenizer.end_id
        self.tokenizer_definition = tokenizer.definition
        identity = f"pairs {corpus.sha256} {tokenizer.fingerprint} {run.data.validation_fraction}"
        self.fingerprint = hashlib.sha256(identity.encode()).hexdigest()
        self._known: dict[int, Tensor] = {}  # the reference's losses of a pair's rows, by the pair

    @property
    def validation_sequences(self) -> Mapping[str, int]:
        """How many rows `validation` gives."""
        return {"": min(max(2, self.recipe.evaluation.sequences // 2 * 2), 2 * len(self.held_out))}

    def batches(self, first_step: int) -> Iterator[Sequence[tuple[Tensor, ...]]]:
        """The micro-batches of step ``first_step``, of the next, and so on; each epoch has an order of its own."""
        count = self.recipe.global_batch // 2 // self.ranks
        for step in itertools.count(first_step):
            own = self._order(step, self.rank * count, count)
            yield [self._batch(pairs) for pairs in self._divided([self.train[at] for at in own])]

    def documents(self, step: int) -> Sequence[str]:
        """The places of the records that the batch of a step has."""
        return [self.train[at].place for at in self._order(step, 0, self.recipe.global_batch // 2)]

    def validation(self, source: str = "") -> Iterator[tuple[Tensor, ...]]:
        """The held-out batches, the same each time."""
        return map(self._batch, self._divided(self.held_out[: self.validation_sequences[source] // 2]))

    def take_reference(self, losses: Losses, together: Together) -> None:
        """Have the reference's losses of all pairs, in the order of the records, for batches from now on.

        Data ranks take micro-batches in turn, equally many, and ``together`` gives all of them what each has.
        """
        # Ranks that gather weights together take equally many turns: the last ones may repeat the last micro-batch.
        divided = list(self._divided([*self.train, *self.held_out]))
        turns = ceil_div(len(divided), self.ranks)
        taken = (divided[min(self.rank * turns + turn, len(divided) - 1)] for turn in range(turns))
        own = [losses(*self._batch(pairs)[:2]).tolist() for pairs in taken]
        every = itertools.chain(*together(lambda: own))
        self._known = {
            id(pair): torch.tensor(rows[2 * at : 2 * at + 2], device=self.device)
            for pairs, rows in zip(divided, every, strict=False)
            for at, pair in enumerate(pairs)
        }

    def close(self) -> None:
        """Nothing is open."""

    def _order(self, step: int, first: int, count: int) -> list[int]:
        n, whole = len(self.train), self.recipe.global_batch // 2
        order: list[int] = sequences_of_step(
            n, seed=self.recipe.seed, step=step, global_batch=whole, first=first, count=count
        ).tolist()
        return order

    def _divided(self, pairs: Sequence[Pair]) -> Iterator[Sequence[Pair]]:
        """Pairs in micro-batches, the last of which may be smaller."""
        size = self.micro_batch // 2
        return (pairs[first : first + size] for first in range(0, len(pairs), size))

    def _batch(self, pairs: Sequence[Pair]) -> tuple[Tensor, ...]:
        """Inputs [B, T] and targets [B, T], and the reference's losses [B] where they are known."""
        rows = [row for pair in pairs for row in pair.rows]
        ids = torch.full((len(rows), self.recipe.seq_len + 1), self.end_id)
        targets = torch.full((len(rows), self.recipe.seq_len), IGNORED)
        for at, (tokens, begins) in enumerate(rows):
            ids[at, : len(tokens)] = torch.from_numpy(tokens.astype(np.int64))
            targets[at, begins - 1 : len(tokens) - 1] = ids[at, begins : len(tokens)]
        batch = (ids[:, :-1].contiguous().to(self.device), targets.to(self.device))
        if not self._known:
            return batch
        return (*batch, torch.cat([self._known[id(pair)] for pair in pairs]))


def open_pairs(run: Run, device: torch.device | str, *, rank: int = 0, ranks: int = 1) -> Pairs:
    """The pairs of a run's data.

    Raises InvalidInput for text that cannot be read, a tokenizer that would be trained, a vocabulary larger than the
    model's, and where no pair is left to train on or to hold out.
    """
    data = run.data
    if data.mixture:
        raise InvalidInput([Problem("data.mixture", None, "is not read for preferences: give data.path alone")])
    if data.tokenizer == "bpe":
        raise InvalidInput([Problem("data.tokenizer", "bpe", "is not trained on pairs", "bytes")])
    tokenizer = ByteTokenizer() if data.tokenizer == "bytes" else read_tokenizer(data.tokenizer, data.end_token)
    if problem := vocabulary_problem(run.model.vocab_size, tokenizer.vocab_size, f"the tokenizer {tokenizer.name}"):
        raise InvalidInput([problem])
    cache = Path(data.cache).expanduser()
    try:
        cache.mkdir(parents=True, exist_ok=True)
        corpus = identify(find_corpus(data.path, cache), cache)
    except OSError as error:
        raise problem_of_writing(cache, error) from None
    split: tuple[list[Pair], list[Pair]] = ([], [])
    cut = without = 0
    for prompt, answers in _records(corpus, data):
        encoded = tokenizer.encode([prompt.text, *answers])
        end = np.array([tokenizer.end_id], dtype=np.uint32)
        begins = 1 + len(encoded[0])
        # An end token before the prompt, as before every document in training.
        rows = [np.concatenate([end, encoded[0], answer, end]) for answer in encoded[1:]]
        if begins > run.recipe.seq_len:
            without += 1
            continue
        cut += any(len(row) > run.recipe.seq_len + 1 for row in rows)
        # By the prompt: none is trained on with one pair and held out with another.
        pair = Pair(tuple((row[: run.recipe.seq_len + 1], begins) for row in rows), prompt.place)
        split[held_out(prompt.text.encode(), data.validation_fraction)].append(pair)
    length = f"recipe.seq_len = {run.recipe.seq_len} tokens"
    if not all(split):
        rule = f"leaves {len(split[0])} pairs to train on and {len(split[1])} to hold out, of prompts below {length}"
        raise InvalidInput([Problem("data.validation_fraction", data.validation_fraction, rule)])
    remarks = [f"{len(split[0]):,} pairs are trained on, {len(split[1]):,} are held out."]
    if cut or without:
        remarks.append(
            f"Of {cut:,} pairs an answer is cut off at {length}; {without:,} with a longer prompt are left out."
        )
    return Pairs(run, tokenizer, corpus, *split, device, remarks, rank, ranks)


def _records(corpus: Corpus, data: DataSpec) -> Iterator[tuple[Document, list[str]]]:
    """The prompt and both answers of each record."""
    for segment in (segment for shard in plan_shards(corpus) for segment in shard):
        if segment.kind == "text":
            rule = f"is text, and preferences are records with the fields {PROMPT}, {' and '.join(ANSWERS)}"
            raise InvalidInput([Problem("data.path", segment.path, rule, "a .jsonl or .parquet file")])
        answers = [{answer.at: answer.text for answer in documents(segment, field)} for field in ANSWERS]
        for prompt in documents(segment, PROMPT):
            texts = [by_place.get(prompt.at) for by_place in answers]
            if None in texts:
                rule = f"has a prompt and no text in the field {ANSWERS[texts.index(None)]}"
                raise InvalidInput([Problem("data.path", prompt.place, rule)])
            yield prompt, [text for text in texts if text is not None]

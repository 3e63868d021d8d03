"""Answers to prompts, as batches: records with the fields ``prompt``, ``chosen`` and ``rejected``, or of single answers
``prompt``, ``completion`` and ``label`` (true or false).

A row is an end token, the prompt, one answer and an end token, cut off at seq_len tokens after the first, or filled up.
Targets of the prompt and of what fills up are `IGNORED`. The rows of a pair are neighbours, the chosen answer first.
With a single answer come its weight, below zero for one that is undesirable, and the row of its prompt with the answer
of the record before (the last one's for the first).

Shapes: B rows of a micro-batch, T = seq_len.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from trainledger.engine.data.corpus import Corpus, find_corpus, identify, plan_shards
from trainledger.engine.data.documents import Document, documents, held_out
from trainledger.engine.data.files import problem_of_writing
from trainledger.engine.data.mixture import sequences_of_step
from trainledger.engine.data.tokenizer import ByteTokenizer, Ids, Tokenizer, read_tokenizer
from trainledger.spec.objective import KTO
from trainledger.spec.problem import InvalidInput, Problem
from trainledger.spec.run import DataSpec, Run
from trainledger.spec.runfile import vocabulary_problem
from trainledger.spec.units import ceil_div

PROMPT, ANSWERS, SINGLE = "prompt", ("chosen", "rejected"), ("completion", "label")
IGNORED = -100

Losses = Callable[[Tensor, Tensor], Tensor]  # inputs_BT and targets_BT to the summed loss of each row
Together = Callable[[Callable[[], list[list[float]]]], list[list[list[float]]]]  # of every rank, by rank


@dataclass(frozen=True)
class Pair:
    """The tokens of both rows of an example, where their answers begin, the place of the record, and the weight of a
    single answer, whose second row is mismatched."""

    rows: tuple[tuple[Ids, int], ...]
    place: str
    weight: float = 0.0


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
        self.answers = self.recipe.objective.answers
        self.examples = self.recipe.global_batch // self.answers  # of a step, on all ranks
        self.end_id = tokenizer.end_id
        self.tokenizer_definition = tokenizer.definition
        identity = f"pairs {corpus.sha256} {tokenizer.fingerprint} {run.data.validation_fraction}"
        self.fingerprint = hashlib.sha256(identity.encode()).hexdigest()
        self._known: dict[int, Tensor] = {}  # the reference's losses of a pair's rows, by the pair

    @property
    def validation_sequences(self) -> Mapping[str, int]:
        """How many rows `validation` gives."""
        asked = max(1, self.recipe.evaluation.sequences // self.answers)
        return {"": self.answers * min(asked, len(self.held_out))}

    def batches(self, first_step: int) -> Iterator[Sequence[tuple[Tensor, ...]]]:
        """The micro-batches of step ``first_step``, of the next, and so on; each epoch has an order of its own."""
        count = self.examples // self.ranks
        for step in itertools.count(first_step):
            own = self._order(step, self.rank * count, count)
            yield [self._batch(pairs) for pairs in self._divided([self.train[at] for at in own])]

    def documents(self, step: int) -> Sequence[str]:
        """The places of the records that the batch of a step has."""
        return [self.train[at].place for at in self._order(step, 0, self.examples)]

    def validation(self, source: str = "") -> Iterator[tuple[Tensor, ...]]:
        """The held-out batches, the same each time."""
        return map(self._batch, self._divided(self.held_out[: self.validation_sequences[source] // self.answers]))

    def take_reference(self, losses: Losses, together: Together) -> None:
        """Have the reference's losses of all pairs, in the order of the records, for batches from now on.

        Data ranks take micro-batches in turn, equally many, and ``together`` gives all of them what each has.
        """
        # Ranks that gather weights together take equally many turns: the last ones may repeat the last micro-batch.
        divided = list(self._divided([*self.train, *self.held_out], rows=2))
        turns = ceil_div(len(divided), self.ranks)
        taken = (divided[min(self.rank * turns + turn, len(divided) - 1)] for turn in range(turns))
        own = [losses(*self._tokens([row for pair in pairs for row in pair.rows])).tolist() for pairs in taken]
        every = itertools.chain(*together(lambda: own))
        self._known = {
            id(pair): torch.tensor(rows[2 * at : 2 * at + 2], device=self.device)
            for pairs, rows in zip(divided, every, strict=False)
            for at, pair in enumerate(pairs)
        }

    def close(self) -> None:
        """Nothing is open."""

    def _order(self, step: int, first: int, count: int) -> list[int]:
        order: list[int] = sequences_of_step(
            len(self.train), seed=self.recipe.seed, step=step, global_batch=self.examples, first=first, count=count
        ).tolist()
        return order

    def _divided(self, pairs: Sequence[Pair], *, rows: int = 0) -> Iterator[Sequence[Pair]]:
        """Examples in micro-batches, the last of which may be smaller; of so many ``rows`` each, or their answers."""
        size = max(1, self.micro_batch // (rows or self.answers))
        return (pairs[first : first + size] for first in range(0, len(pairs), size))

    def _batch(self, pairs: Sequence[Pair]) -> tuple[Tensor, ...]:
        """Inputs [B, T] and targets [B, T]; of single answers weights and the same of mismatched rows; and the
        reference's losses [B] where they are known."""
        known = [self._known[id(pair)] for pair in pairs if self._known]
        if not self.recipe.objective.mismatched:
            batch = self._tokens([row for pair in pairs for row in pair.rows])
            return (*batch, torch.cat(known)) if known else batch
        weights = torch.tensor([pair.weight for pair in pairs], device=self.device)
        own, mismatched = (self._tokens([pair.rows[at] for pair in pairs]) for at in (0, 1))
        return (*own, weights, *mismatched, *(torch.stack(known, 1) if known else ()))

    def _tokens(self, rows: Sequence[tuple[Ids, int]]) -> tuple[Tensor, Tensor]:
        """Inputs [B, T] and targets [B, T] of rows."""
        ids = torch.full((len(rows), self.recipe.seq_len + 1), self.end_id)
        targets = torch.full((len(rows), self.recipe.seq_len), IGNORED)
        for at, (tokens, begins) in enumerate(rows):
            ids[at, : len(tokens)] = torch.from_numpy(tokens.astype(np.int64))
            targets[at, begins - 1 : len(tokens) - 1] = ids[at, begins : len(tokens)]
        return ids[:, :-1].contiguous().to(self.device), targets.to(self.device)


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
    objective = run.recipe.objective
    what, fields = ("pairs", ANSWERS) if objective.answers == 2 else ("answers", SINGLE)
    for prompt, answers in _records(corpus, data, fields):
        weight = _weight(objective, answers.pop(), prompt.place) if isinstance(objective, KTO) else 0.0
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
        pair = Pair(tuple((row[: run.recipe.seq_len + 1], begins) for row in rows), prompt.place, weight)
        split[held_out(prompt.text.encode(), data.validation_fraction)].append(pair)
    length = f"recipe.seq_len = {run.recipe.seq_len} tokens"
    if not all(split):
        rule = f"leaves {len(split[0])} {what} to train on and {len(split[1])} to hold out, of prompts below {length}"
        raise InvalidInput([Problem("data.validation_fraction", data.validation_fraction, rule)])
    remarks = [f"{len(split[0]):,} {what} are trained on, {len(split[1]):,} are held out."]
    if cut or without:
        remarks.append(
            f"Of {cut:,} {what} an answer is cut off at {length}; {without:,} with a longer prompt are left out."
        )
    train, held = (_mismatched(part, run.recipe.seq_len) if objective.mismatched else part for part in split)
    return Pairs(run, tokenizer, corpus, train, held, device, remarks, rank, ranks)


def _weight(objective: KTO, label: str, place: str) -> float:
    """The weight of a single answer, below zero for one that is undesirable."""
    if label not in ("true", "false"):
        raise InvalidInput(
            [Problem("data.path", place, f"has the label {label!r}, which must be true or false", "true")]
        )
    return objective.desirable if label == "true" else -objective.undesirable


# TRL mismatches within micro-batches of a fixed order (1.16, kto_trainer.py); so does the paper. Here each epoch has
# another order, so that the answers of the records in their own are moved by one, once.
def _mismatched(pairs: Sequence[Pair], seq_len: int) -> list[Pair]:
    """Examples with a second row each: their own prompt and the answer of the one before."""
    joint = []
    for pair, before in zip(pairs, [pairs[-1], *pairs[:-1]], strict=True):
        (row, begins), (other, others_begin) = pair.rows[0], before.rows[0]
        joined = np.concatenate([row[:begins], other[others_begin:]])[: seq_len + 1]
        joint.append(replace(pair, rows=(pair.rows[0], (joined, begins))))
    return joint


def _records(corpus: Corpus, data: DataSpec, fields: Sequence[str]) -> Iterator[tuple[Document, list[str]]]:
    """The prompt and the texts of some fields of each record."""
    for segment in (segment for shard in plan_shards(corpus) for segment in shard):
        if segment.kind == "text":
            rule = f"is text, and preferences are records with the fields {PROMPT}, {' and '.join(fields)}"
            raise InvalidInput([Problem("data.path", segment.path, rule, "a .jsonl or .parquet file")])
        answers = [{answer.at: answer.text for answer in documents(segment, field)} for field in fields]
        for prompt in documents(segment, PROMPT):
            texts = [by_place.get(prompt.at) for by_place in answers]
            if None in texts:
                rule = f"has a prompt and no text in the field {fields[texts.index(None)]}"
                raise InvalidInput([Problem("data.path", prompt.place, rule)])
            yield prompt, [text for text in texts if text is not None]

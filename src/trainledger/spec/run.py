"""A run: everything that one run file says, and the data that it names."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import field, replace
from fractions import Fraction
from typing import Any

from trainledger.spec.cluster import Cluster
from trainledger.spec.frozen import frozen
from trainledger.spec.layout import AXES, Layout
from trainledger.spec.model import ModelSpec
from trainledger.spec.objective import Distillation
from trainledger.spec.recipe import Recipe
from trainledger.spec.savings import KeepAll
from trainledger.spec.setting import setting

STANDARD_LIBRARY = "python-standard-library"
BLOCK_ROWS = 1000  # sequences in a row of which a mixture has the same number from each source


@frozen(kw_only=True)
class MixtureSource:
    """One of the texts of a mixture."""

    path: tuple[str, ...] = setting("files, globs or directories, as data.path", quantity="paths")
    weight: float = setting("share of the sequences, over the sum of all weights", above=0, at_most=1e9)
    text_field: str | None = setting("field of a JSONL or Parquet record with the text; absent = data.text_field", None)


@frozen(kw_only=True)
class DataSpec:
    """A corpus, or a mixture of several, and its tokenizer."""

    path: tuple[str, ...] = setting(
        "files, globs or directories of text, .jsonl(.gz, .zst) or .parquet; "
        f'"{STANDARD_LIBRARY}" = the text of the running interpreter\'s own library',
        (STANDARD_LIBRARY,),
        quantity="paths",
    )
    mixture: tuple[tuple[str, MixtureSource], ...] | None = setting(
        "several texts instead of path, [data.mixture.NAME] with path and weight for each; absent = path alone",
        None,
        members=MixtureSource,
    )
    text_field: str = setting(
        "field of a JSONL or Parquet record with the text; of JSONL also a list of turns, written in ChatML's markers",
        "text",
    )
    tokenizer: str = setting(
        '"bytes", "bpe" (trained on the corpus, all sources of a mixture) or the path of a tokenizer.json', "bytes"
    )
    end_token: str | None = setting(
        "token that ends a document in a tokenizer.json; absent = the first of these that it has: <|endoftext|>, "
        "<|end_of_text|>, </s>, <eos>",
        None,
    )
    vocab_size: int | None = setting("vocabulary of a bpe tokenizer; absent = model.vocab_size", None, at_least=257)
    validation_fraction: float = setting("share of the documents that is for validation", 0.02, above=0, at_most=0.5)
    cache: str = setting("directory of the tokenized text", "cache")
    lengths: tuple[tuple[int, int], ...] | None = setting(
        "rows of uneven length, padded to the longest of a micro-batch: pairs of tokens and how many rows have them, "
        "or the file that `trainledger data --lengths` writes; longer ones are cut at recipe.seq_len; absent = full "
        "rows",
        None,
        quantity="lengths",
    )

    @property
    def replaced(self) -> tuple[str, ...]:
        """The fields that others replace."""
        return ("path",) if self.mixture else ()

    @property
    def sources(self) -> tuple[tuple[str, DataSpec], ...]:
        """Each source as separate data, by name; a corpus alone has the empty name."""
        if not self.mixture:
            return (("", self),)
        return tuple(
            (name, replace(self, mixture=None, path=source.path, text_field=source.text_field or self.text_field))
            for name, source in self.mixture
        )

    @property
    def weights(self) -> tuple[float, ...]:
        """The weights of the sources, in their order."""
        return tuple(source.weight for _, source in self.mixture) if self.mixture else (1.0,)

    @property
    def paths(self) -> tuple[str, ...]:
        """The paths of all sources."""
        return tuple(path for _, source in self.sources for path in source.path)


def dealt(places: int, weights: Sequence[float]) -> tuple[int, ...]:
    """Whole places for weights, by the largest-remainder method; of equal ones the first.

    >>> dealt(1000, (0.7, 0.3)), dealt(10, (1, 1, 1)), dealt(1000, (1, 5000))
    ((700, 300), (4, 3, 3), (0, 1000))
    """
    exact = [Fraction(weight) for weight in weights]
    quotas = [share * places / sum(exact) for share in exact]
    whole = [int(quota) for quota in quotas]
    by_remainder = sorted(range(len(quotas)), key=lambda at: whole[at] - quotas[at])
    for at in by_remainder[: places - sum(whole)]:
        whole[at] += 1
    return tuple(whole)


@frozen(kw_only=True)
class Origin:
    """Where a run was read, which of its fields were given there, and which were assumed.

    ``source`` is a file's path or a model's name, empty for a run made in Python. ``explicit`` and ``assumed`` hold
    names such as ``recipe.seq_len``; ``notes`` are sentences on what the source says that a run does not hold.
    ``method`` is the recipe of fine-tuning that was asked for by name (`answers.defaults`).
    ``trainer`` is the file or launch line of another program that was read, with the overrides of that reading.
    """

    source: str = ""
    explicit: frozenset[str] = frozenset()
    assumed: tuple[str, ...] = ()
    searched: bool = False  # the layout is the result of a search
    notes: tuple[str, ...] = ()
    method: str = ""
    trainer: tuple[str, tuple[str, ...]] | None = None


@frozen(kw_only=True)
class Run:
    """Model, recipe, layout, cluster and data of one run, and of distillation the ``teacher``; ``origin`` is ignored
    when runs are compared."""

    model: ModelSpec
    recipe: Recipe
    layout: Layout = field(default_factory=Layout)
    cluster: Cluster = field(default_factory=Cluster)
    data: DataSpec = field(default_factory=DataSpec)
    teacher: ModelSpec | None = None
    origin: Origin = field(default_factory=Origin)

    def __eq__(self, other: object) -> bool:
        return self._content == other._content if isinstance(other, Run) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._content)

    @property
    def _content(self) -> tuple[object, ...]:
        return self.model, self.recipe, self.layout, self.cluster, self.data, self.teacher

    def __repr__(self) -> str:
        recipe, layout, usual = self.recipe, self.layout, Layout()
        axes = (*AXES, "expert")
        spread = [f"{axis} {getattr(layout, axis)}" for axis in axes if getattr(layout, axis) != getattr(usual, axis)]
        said = [
            f"{recipe.global_batch} x {recipe.seq_len} tokens a step",
            recipe.precision.kind,
            recipe.optimizer.kind,
            *(["layout auto"] if layout.auto else []),
            *spread,
            f"{self.cluster.count} x {self.cluster.device}",
        ]
        return f"Run({self.model.name}: {', '.join(said)})"

    @property
    def device_batch(self) -> Any:
        """Sequences in one forward of a data rank: ``recipe.micro_batch``, or all that it gets in a step."""
        if self.recipe.micro_batch is not None:
            return self.recipe.micro_batch
        share = self.recipe.global_batch // self.layout.data_ranks
        return 1 if isinstance(share, int) and share == 0 else share  # fewer sequences than ranks: refused elsewhere

    @property
    def reference(self) -> Run | None:
        """The run of the frozen model that is beside the trained one in a step: the teacher, or of preferences the
        model as it began; None where there is none, or adapters are switched off instead."""
        recipe = replace(self.recipe, activation_checkpointing=KeepAll(), lora=None)
        if self.teacher is not None and isinstance(recipe.objective, Distillation):
            begins = {"precision": recipe.precision.untrained, "initial_weights": recipe.objective.teacher_weights}
            return replace(self, model=self.teacher, recipe=replace(recipe, **begins))  # type: ignore[arg-type]
        beside = recipe.objective.reference == "device" and self.recipe.lora is None
        return replace(self, recipe=recipe) if beside else None

    @property
    def width_factor(self) -> Any:
        """The width of the model over that of muP's base model; 1 without muP."""
        return 1 if self.recipe.mup is None else self.model.d_model / self.recipe.mup.base_width

    @property
    def rank_tokens(self) -> Any:
        """Tokens of a sequence that a rank has: context ranks share them."""
        return self.recipe.seq_len // self.layout.context

    @property
    def grad_accum(self) -> Any:
        """Micro-batches of a data rank in one optimizer step."""
        return self.recipe.global_batch // (self.device_batch * self.layout.data_ranks)

"""Which layouts of the grid are allowed: `spec.rules.layout` is asked about the parts that can contradict each other.

Every rule there speaks of a few fields, so a layout is allowed where each of those few is. The same few come in very
many layouts; each is asked about once, in a run that is made for it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from trainledger.plan.layouts.grid import UNSHARDED, Grid, Shape, Sharding, Stages, run_of
from trainledger.spec.layout import Layout
from trainledger.spec.problem import InvalidInput, Problem
from trainledger.spec.rules.run import run_problems

_PLAIN = Shape(1, False, 1, "ring", 1, 1, "none")
_WHOLE = Stages(1, "1f1b", 1, None)


class Constraints:
    """Answers with what is wrong, or None; each question is asked of the rules once."""

    def __init__(self, grid: Grid) -> None:
        self.grid = grid
        one = replace(grid.run.recipe, micro_batch=1, activation_checkpointing=grid.run.recipe.activation_checkpointing)
        said = grid.run.layout
        plain = Layout(prefetch=said.prefetch)
        more = ("sequence_gather", "expert_send", "overlap")
        asked = replace(plain, **{name: getattr(said, name) for name in more})
        self.run = replace(grid.run, recipe=one, layout=asked)
        # What is wrong whatever the layout, but for tokens of a micro-batch, which the grid goes through.
        alone = replace(self.run, recipe=replace(one, micro_batch=one.global_batch), layout=plain)
        wrong = list(run_problems(alone))
        if wrong:
            raise InvalidInput(wrong)
        self.again = one.activation_checkpointing
        self._known: dict[tuple[Any, ...], Problem | None] = {}

    def shape(self, shape: Shape) -> Problem | None:
        """What is wrong with a shape, its experts left out."""
        axes = (shape.tensor, shape.sequence_parallel, shape.context, shape.context_kind)
        plain = replace(_PLAIN, checkpointing=self.again, micro_batch=self._micro_batch())
        found = self._ask(
            ("axes", *axes),
            replace(
                plain, tensor=shape.tensor, sequence_parallel=shape.sequence_parallel, context=shape.context,
                context_kind=shape.context_kind,
            ),
            zero_mode=1 if shape.context > 1 else UNSHARDED,
        )  # fmt: skip
        found = found or self._ask(("again", shape.checkpointing), replace(plain, checkpointing=shape.checkpointing))
        return found or self._ask(("micro-batch", shape.micro_batch), replace(plain, micro_batch=shape.micro_batch))

    def stages(self, stages: Stages) -> Problem | None:
        """What is wrong with the layers of a pipeline."""
        return self._ask(("stages", stages), self._shape(), stages, micro_batches=stages.pipeline)

    def batch(self, micro_batch: int, data_ranks: int) -> Problem | None:
        """What is wrong where each data rank takes so many sequences at once."""
        key = ("batch", micro_batch, data_ranks)
        if key in self._known:
            return self._known[key]
        return self._ask(key, self._shape(micro_batch), sharding=Sharding(data_ranks, 1, UNSHARDED), micro_batches=None)

    def rounds(self, schedule: str, pipeline: int, micro_batches: int) -> Problem | None:
        """What is wrong where a schedule gets so many micro-batches."""
        key = ("rounds", schedule, pipeline, micro_batches)
        if key in self._known:
            return self._known[key]
        several = 2 if schedule == "interleaved" else 1
        layers = (self.grid.run.model.n_layers, *(0,) * (pipeline * several - 1))
        return self._ask(key, self._shape(), Stages(pipeline, schedule, several, layers), micro_batches=micro_batches)

    def experts(self, expert: int, shard_ranks: int, zero_mode: int) -> Problem | None:
        """What is wrong with expert ranks among so many that share in this way."""
        key = ("experts", expert, shard_ranks, zero_mode)
        if expert == 1:
            return None
        if key in self._known:
            return self._known[key]
        return self._ask(key, replace(self._shape(), expert=expert), sharding=Sharding(1, shard_ranks, zero_mode))

    def zero_mode(self, zero_mode: int, schedule: str, pipeline: int, checkpointing: str) -> Problem | None:
        """What is wrong with this way of sharing states."""
        if zero_mode == UNSHARDED:
            return None
        several, layers = pipeline > 1, self.grid.run.model.n_layers
        key = ("zero_mode", zero_mode, schedule, several, checkpointing)
        if key in self._known:
            return self._known[key]
        stages = _WHOLE
        if several:
            chunks = 4 if schedule == "interleaved" else 2
            stages = Stages(2, schedule, chunks // 2, (layers,) + (0,) * (chunks - 1))
        shape = replace(self._shape(), checkpointing=checkpointing)
        return self._ask(key, shape, stages, sharding=Sharding(1, 2, zero_mode), micro_batches=2)

    def _shape(self, micro_batch: int | None = None) -> Shape:
        return replace(
            _PLAIN, checkpointing=self.again, micro_batch=self._micro_batch() if micro_batch is None else micro_batch
        )

    def _micro_batch(self) -> int:
        """One of which the rules have nothing to say."""
        return self.grid.run.recipe.global_batch

    def _ask(
        self, key: tuple[Any, ...], shape: Shape, stages: Stages = _WHOLE, sharding: Sharding | None = None,
        zero_mode: int = UNSHARDED, micro_batches: int | None = 1,
    ) -> Problem | None:  # fmt: skip
        if key not in self._known:
            sharding = sharding or Sharding(1, 1, zero_mode)
            run = run_of(self.run, shape, stages, sharding)
            if micro_batches is not None:
                batch = shape.micro_batch * sharding.replicate * sharding.shard * micro_batches
                run = replace(run, recipe=replace(run.recipe, global_batch=batch))
            self._known[key] = next(run_problems(run), None)
        return self._known[key]

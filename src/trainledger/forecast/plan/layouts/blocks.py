"""The layouts of the grid that the rules allow, in blocks that are bounded together; others are counted by reason."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import Any

from trainledger.forecast.plan.layouts.grid import UNSHARDED, ZERO_MODES, Grid, Shape, Sharding, Stages, run_of
from trainledger.forecast.plan.layouts.stages import Ranks
from trainledger.spec.frozen import frozen
from trainledger.spec.layout import Layout
from trainledger.spec.problem import InvalidInput, Problem
from trainledger.spec.rules.run import run_problems

WHOLE_BATCH = "recipe.global_batch must be a multiple of micro_batch x data ranks (layout.replicate x layout.shard)"
WHOLE_ROUNDS = "layout.schedule interleaved takes micro-batches in rounds of as many as there are stages"


_PLAIN = Shape(1, False, 1, "ring", 1, 1, "none")
_WHOLE = Stages(1, "1f1b", 1, None)


class Constraints:
    """Which layouts of the grid are allowed: each method says what is wrong with some fields, or None.

    Every rule of `spec.rules.layout` speaks of a few fields, so a layout is allowed where each of those few is. The
    same few come in very many layouts; the rules check each once, in a run that is made for it.
    """

    def __init__(self, grid: Grid) -> None:
        self.grid = grid
        one, said = replace(grid.run.recipe, micro_batch=1), grid.run.layout
        plain = Layout(prefetch=said.prefetch)
        more = ("sequence_gather", "expert_send", "overlap")
        self.run = replace(grid.run, recipe=one, layout=replace(plain, **{name: getattr(said, name) for name in more}))
        # What is wrong in every layout, except for tokens of a micro-batch, which the grid varies.
        wrong = list(run_problems(replace(self.run, recipe=replace(one, micro_batch=one.global_batch), layout=plain)))
        if wrong:
            raise InvalidInput(wrong)
        # The rules have nothing to say of one micro-batch.
        self.plain = replace(_PLAIN, checkpointing=one.activation_checkpointing.kind, micro_batch=one.global_batch)
        self._of_shape, self.stages, self.batch = cache(self._problem), cache(self._stages), cache(self._batch)
        self.rounds, self.experts, self.zero_mode = cache(self._rounds), cache(self._experts), cache(self._zero_mode)

    def shape(self, shape: Shape) -> Problem | None:
        """What is wrong with a shape, its experts left out."""
        plain = self.plain
        axes = replace(shape, expert=1, checkpointing=plain.checkpointing, micro_batch=plain.micro_batch)
        shared = Sharding(1, 1, 1 if shape.context > 1 else UNSHARDED)
        return (
            self._of_shape(axes, sharding=shared)
            or self._of_shape(replace(plain, checkpointing=shape.checkpointing))
            or self._of_shape(replace(plain, micro_batch=shape.micro_batch))
        )

    def axes(self, tensor: int, sequence_parallel: bool, context: int, context_kind: str) -> Problem | None:
        """What is wrong with a shape of such tensor and context ranks."""
        ranks = Shape(
            tensor, sequence_parallel, context, context_kind, 1, self.plain.micro_batch, self.plain.checkpointing
        )
        return self.shape(ranks)

    def _stages(self, stages: Stages) -> Problem | None:
        """What is wrong with the layers of a pipeline."""
        return self._problem(self.plain, stages, micro_batches=stages.pipeline)

    def _batch(self, micro_batch: int, data_ranks: int) -> Problem | None:
        """What is wrong where each data rank takes so many sequences at once."""
        sharding = Sharding(data_ranks, 1, UNSHARDED)
        return self._problem(replace(self.plain, micro_batch=micro_batch), sharding=sharding, micro_batches=None)

    def _rounds(self, schedule: str, pipeline: int, micro_batches: int) -> Problem | None:
        """What is wrong where a schedule gets so many micro-batches."""
        several = 2 if schedule == "interleaved" else 1
        layers = (self.grid.run.model.n_layers, *(0,) * (pipeline * several - 1))
        return self._problem(self.plain, Stages(pipeline, schedule, several, layers), micro_batches=micro_batches)

    def _experts(self, expert: int, shard_ranks: int, zero_mode: int) -> Problem | None:
        """What is wrong with expert ranks among so many that share in this way."""
        if expert == 1:
            return None
        return self._problem(replace(self.plain, expert=expert), sharding=Sharding(1, shard_ranks, zero_mode))

    def _zero_mode(self, zero_mode: int, schedule: str, several: bool, checkpointing: str) -> Problem | None:
        """What is wrong with this way of sharing states, in ``several`` stages or in one."""
        if zero_mode == UNSHARDED:
            return None
        stages, layers = _WHOLE, self.grid.run.model.n_layers
        if several:
            chunks = 4 if schedule == "interleaved" else 2
            stages = Stages(2, schedule, chunks // 2, (layers,) + (0,) * (chunks - 1))
        shape = replace(self.plain, checkpointing=checkpointing)
        return self._problem(shape, stages, Sharding(1, 2, zero_mode), micro_batches=2)

    def _problem(
        self,
        shape: Shape,
        stages: Stages = _WHOLE,
        sharding: Sharding = Sharding(1, 1, UNSHARDED),  # noqa: B008
        micro_batches: int | None = 1,
    ) -> Problem | None:
        """The first rule that is broken; ``micro_batches`` None keeps the batch of the run."""
        run = run_of(self.run, shape, stages, sharding)
        if micro_batches is not None:
            batch = shape.micro_batch * sharding.replicate * sharding.shard * micro_batches
            run = replace(run, recipe=replace(run.recipe, global_batch=batch))
        return next(run_problems(run), None)


@frozen
class Block:
    """The layouts with the same ranks of tensor, context, pipeline and experts.

    ``variants`` are places in the list of shapes, ``columns`` places in the tables of states.
    """

    tensor: int
    context: int
    pipeline: int
    expert: int
    data_ranks: int
    variants: Any
    micro_batches: Any
    shardings: tuple[Sharding, ...]
    columns: tuple[int, ...]

    @property
    def zero_modes(self) -> Any:
        """How each of the shardings shares states."""
        import numpy as np

        return np.array([sharding.zero_mode for sharding in self.shardings])

    def only(self, places: Any) -> Block:
        """The block with some of its shardings."""
        shardings, columns = ([every[at] for at in places] for every in (self.shardings, self.columns))
        return replace(self, shardings=tuple(shardings), columns=tuple(columns))


Corner = tuple[int, int, int, int]  # tensor, context, pipeline and data ranks of a block, its experts left out


class Blocks:
    """All allowed layouts of a grid: ``blocks`` and ``stages`` by the pipeline's length, and the list of shapes.

    ``searched`` counts the grid, ``rejected`` the layouts that are not allowed, by reason.
    """

    def __init__(self, grid: Grid) -> None:
        import numpy as np

        self.grid, self.constraints = grid, Constraints(grid)
        self.searched = 0
        self.rejected: Counter[str] = Counter()
        self.shapes: list[Shape] = []
        self.ranks: dict[Ranks, int] = {}
        self.blocks: dict[int, list[Block]] = {}
        self.stages: dict[int, list[Stages]] = {}
        self._all_stages: dict[int, list[Stages]] = {}
        self._shardings: dict[tuple[int, int], list[Sharding]] = {}
        self._axes: dict[tuple[int, int], list[tuple[bool, str]]] = {}
        self._again = [each for each in grid.again() if not self._forbids(each)]
        corners = list(self._corners())
        self._sizes = self._micro_batches({data_ranks for *_, data_ranks in corners})
        used: dict[tuple[int, int], set[int]] = {}
        for tensor, context, _, data_ranks in corners:
            used.setdefault((tensor, context), set()).update(self._sizes[data_ranks])
        self._variants = {key: self._list(*key, sorted(sizes)) for key, sizes in used.items()}
        numbers = {name: index for index, name in enumerate(self._again)}
        self._numbers = np.array([numbers[shape.checkpointing] for shape in self.shapes], np.int64)
        for corner in corners:
            self._add(corner)

    def _forbids(self, again: str) -> Problem | None:
        return self.constraints.shape(replace(self.constraints.plain, checkpointing=again))

    def _corners(self) -> Iterator[Corner]:
        """The ranks that some layout may have; layouts of all others are counted here."""
        grid = self.grid
        inside = len(grid.again()) * len(grid.micro_batches()) * len(grid.experts())
        for tensor, context, pipeline in grid.blocks():
            data_ranks = grid.devices // (tensor * context * pipeline)
            stages = self._stages_of(pipeline)
            shardings = len(self._shardings_of(data_ranks, context))
            axes = [(parallel, kind) for parallel in grid.parallels(tensor) for kind in grid.kinds(context)]
            each_axes = inside * len(stages) * shardings
            self.searched += each_axes * len(axes)
            allowed = self._allowed_axes(tensor, context, axes, each_axes)
            left = inside * shardings * len(allowed)
            self._reject([self.constraints.stages(stage) for stage in stages], left)
            ok_stages = len(self.stages[pipeline])
            left = ok_stages * shardings * len(allowed) * len(grid.micro_batches()) * len(grid.experts())
            self._reject([self._forbids(each) for each in grid.again()], left)
            if allowed and ok_stages and self._again and shardings:
                yield tensor, context, pipeline, data_ranks

    def _allowed_axes(self, tensor: int, context: int, axes: list[tuple[bool, str]], count: int) -> list[Any]:
        problems = [self.constraints.axes(tensor, each, context, kind) for each, kind in axes]
        self._reject(problems, count)
        allowed = [axis for axis, problem in zip(axes, problems, strict=True) if problem is None]
        self._axes[tensor, context] = allowed
        return allowed

    def _reject(self, problems: list[Problem | None], count: int) -> None:
        for problem in problems:
            if problem is not None and count:
                self.rejected[f"{problem.field} {problem.rule}"] += count

    def _stages_of(self, pipeline: int) -> list[Stages]:
        if pipeline not in self._all_stages:
            every = self._all_stages[pipeline] = list(self.grid.stages(pipeline))
            self.stages[pipeline] = [stages for stages in every if self.constraints.stages(stages) is None]
        return self._all_stages[pipeline]

    def _shardings_of(self, data_ranks: int, context: int) -> list[Sharding]:
        key = data_ranks, context
        if key not in self._shardings:
            self._shardings[key] = list(self.grid.shardings(*key))
        return self._shardings[key]

    def _micro_batches(self, data_ranks: set[int]) -> dict[int, list[int]]:
        """The sizes of a micro-batch that go into the batch of each number of data ranks."""
        rules, every = self.constraints, self.grid.micro_batches()
        allowed = [each for each in every if rules.shape(replace(rules.plain, micro_batch=each)) is None]
        return {ranks: [each for each in allowed if rules.batch(each, ranks) is None] for ranks in data_ranks}

    def _list(self, tensor: int, context: int, sizes: list[int]) -> dict[int, tuple[Any, Any]]:
        """By expert ranks: places of the shapes of these ranks, and their micro-batches."""
        import numpy as np

        found = {}
        for expert in self.grid.experts():
            start = len(self.shapes)
            self.shapes += [
                Shape(tensor, parallel, context, kind, expert, size, again)
                for parallel, kind in self._axes[tensor, context]
                for size in sizes
                for again in self._again
            ]
            some = self.shapes[start:]
            found[expert] = (
                np.arange(start, len(self.shapes)),
                np.array([shape.micro_batch for shape in some], np.int64),
            )
        return found

    def _add(self, corner: Corner) -> None:
        """The blocks of a corner, one for each number of expert ranks."""
        import numpy as np

        grid, (tensor, context, pipeline, data_ranks) = self.grid, corner
        shardings, sizes = self._shardings_of(data_ranks, context), self._sizes[data_ranks]
        around = len(self.stages[pipeline]) * len(self._axes[tensor, context]) * len(self._again)
        every = len(grid.micro_batches())
        self.rejected[WHOLE_BATCH] += (every - len(sizes)) * around * len(shardings) * len(grid.experts())
        for expert in grid.experts():
            problems = [
                self.constraints.experts(expert, sharding.shard * context, sharding.zero_mode) for sharding in shardings
            ]
            self._reject(problems, around * len(sizes))
            allowed = tuple(sharding for sharding, problem in zip(shardings, problems, strict=True) if problem is None)
            places, of_size = self._variants[tensor, context][expert]
            which = np.isin(of_size, sizes)
            if not allowed or not which.any():
                continue
            ranks = [(tensor, expert, sharding.shard * context, sharding.replicate > 1) for sharding in allowed]
            columns = tuple(self.ranks.setdefault(rank, len(self.ranks)) for rank in ranks)
            micro_batches = grid.run.recipe.global_batch // (of_size[which] * data_ranks)
            self.blocks.setdefault(pipeline, []).append(
                Block(tensor, context, pipeline, expert, data_ranks, places[which], micro_batches, allowed, columns)
            )

    def allowed(self, block: Block) -> Any:
        """Which layouts of a block the rules allow with each way to run its pipeline, [S, V, U]; others are counted."""
        import numpy as np

        ways, size = self.stages[block.pipeline], len(block.shardings)
        counts, inverse = np.unique(block.micro_batches, return_inverse=True)
        rounds = np.array([
            [stages.schedule != "interleaved"
             or self.constraints.rounds(stages.schedule, stages.pipeline, int(count)) is None
             for count in counts] for stages in ways
        ])[:, inverse]  # fmt: skip
        self.rejected[WHOLE_ROUNDS] += int((~rounds).sum()) * size
        again = self._numbers[block.variants]
        zero_mode = np.array([sharding.zero_mode for sharding in block.shardings])
        shares = np.ones((len(ways), len(self._again), len(ZERO_MODES)), bool)
        for way, stages in enumerate(ways):
            for number, name in enumerate(self._again):
                count = int((rounds[way] & (again == number)).sum())
                for how in set(zero_mode.tolist()):
                    problem = self.constraints.zero_mode(how, stages.schedule, stages.pipeline > 1, name)
                    shares[way, number, how] = problem is None
                    if problem is not None:
                        self._reject([problem], count * int((zero_mode == how).sum()))
        return rounds[:, :, None] & shares[:, again][:, :, zero_mode]

"""The grid cut into blocks that are bounded together, each layout that a rule forbids counted under its reason."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

from trainledger.frozen import frozen
from trainledger.plan.layouts.constraints import Constraints
from trainledger.plan.layouts.grid import ZERO_MODES, Grid, Shape, Sharding, Stages
from trainledger.plan.layouts.states import Ranks
from trainledger.spec.problem import Problem

WHOLE_BATCH = "recipe.global_batch must be a multiple of micro_batch x data ranks (layout.replicate x layout.shard)"
WHOLE_ROUNDS = "layout.schedule interleaved takes micro-batches in rounds of as many as there are stages"


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


@frozen
class Corner:
    """The ranks of a block, its experts left out."""

    tensor: int
    context: int
    pipeline: int
    data_ranks: int


class Blocks:
    """All allowed layouts of a grid: ``blocks`` and ``stages`` by the pipeline's length, and the list of shapes.

    ``searched`` counts the grid, ``rejected`` the layouts that are not allowed, by reason.
    """

    def __init__(self, grid: Grid, constraints: Constraints) -> None:
        import numpy as np

        self.grid, self.constraints = grid, constraints
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
        self._sizes = self._micro_batches({each.data_ranks for each in corners})
        used: dict[tuple[int, int], set[int]] = {}
        for each in corners:
            used.setdefault((each.tensor, each.context), set()).update(self._sizes[each.data_ranks])
        self._variants = {key: self._list(*key, sorted(sizes)) for key, sizes in used.items()}
        numbers = {name: index for index, name in enumerate(self._again)}
        self._numbers = np.array([numbers[each.checkpointing] for each in self.shapes], np.int64)
        for each in corners:
            self._add(each)

    def _forbids(self, again: str) -> Problem | None:
        batch = self.grid.run.recipe.global_batch
        return self.constraints.shape(Shape(1, False, 1, "ring", 1, batch, again))

    def _corners(self) -> Iterator[Corner]:
        """The ranks that some layout may have; layouts of all others are counted here."""
        grid = self.grid
        inside = len(grid.again()) * len(grid.micro_batches()) * len(grid.experts())
        for tensor, context, pipeline in grid.blocks():
            data_ranks = grid.devices // (tensor * context * pipeline)
            stages = self._stages_of(pipeline)
            shardings = len(self._shardings_of(data_ranks, context))
            axes = [(each, kind) for each in grid.parallels(tensor) for kind in grid.kinds(context)]
            each_axes = inside * len(stages) * shardings
            self.searched += each_axes * len(axes)
            allowed = self._allowed_axes(tensor, context, axes, each_axes)
            left = inside * shardings * len(allowed)
            self._reject([self.constraints.stages(each) for each in stages], left)
            ok_stages = len(self.stages[pipeline])
            left = ok_stages * shardings * len(allowed) * len(grid.micro_batches()) * len(grid.experts())
            self._reject([self._forbids(each) for each in grid.again()], left)
            if allowed and ok_stages and self._again and shardings:
                yield Corner(tensor, context, pipeline, data_ranks)

    def _allowed_axes(self, tensor: int, context: int, axes: list[tuple[bool, str]], count: int) -> list[Any]:
        problems = [self.constraints.shape(self._shape(tensor, each, context, kind)) for each, kind in axes]
        self._reject(problems, count)
        allowed = [each for each, problem in zip(axes, problems, strict=True) if problem is None]
        self._axes[tensor, context] = allowed
        return allowed

    def _shape(self, tensor: int, parallel: bool, context: int, kind: str) -> Shape:
        recipe = self.grid.run.recipe
        return Shape(tensor, parallel, context, kind, 1, recipe.global_batch, recipe.activation_checkpointing)

    def _reject(self, problems: list[Problem | None], count: int) -> None:
        for each in problems:
            if each is not None and count:
                self.rejected[f"{each.field} {each.rule}"] += count

    def _stages_of(self, pipeline: int) -> list[Stages]:
        if pipeline not in self._all_stages:
            every = self._all_stages[pipeline] = list(self.grid.stages(pipeline))
            self.stages[pipeline] = [each for each in every if self.constraints.stages(each) is None]
        return self._all_stages[pipeline]

    def _shardings_of(self, data_ranks: int, context: int) -> list[Sharding]:
        key = data_ranks, context
        if key not in self._shardings:
            self._shardings[key] = list(self.grid.shardings(*key))
        return self._shardings[key]

    def _micro_batches(self, data_ranks: set[int]) -> dict[int, list[int]]:
        """The sizes of a micro-batch that go into the batch of each number of data ranks."""
        found = {}
        for ranks in data_ranks:
            sizes = [each for each in self.grid.micro_batches() if self.constraints.batch(each, ranks) is None]
            found[ranks] = [each for each in sizes if self.constraints.shape(Shape(
                1, False, 1, "ring", 1, each, self.grid.run.recipe.activation_checkpointing)) is None]  # fmt: skip
        return found

    def _list(self, tensor: int, context: int, sizes: list[int]) -> dict[int, tuple[Any, Any]]:
        """By expert ranks: places of the shapes of these ranks, and their micro-batches."""
        import numpy as np

        found = {}
        for expert in self.grid.experts():
            start = len(self.shapes)
            self.shapes += [
                Shape(tensor, parallel, context, kind, expert, size, again)
                for parallel, kind in self._axes[tensor, context] for size in sizes for again in self._again
            ]  # fmt: skip
            some = self.shapes[start:]
            found[expert] = (
                np.arange(start, len(self.shapes)), np.array([each.micro_batch for each in some], np.int64),
            )  # fmt: skip
        return found

    def _add(self, corner: Corner) -> None:
        """The blocks of a corner, one for each number of expert ranks."""
        import numpy as np

        grid, tensor, context = self.grid, corner.tensor, corner.context
        shardings, sizes = self._shardings_of(corner.data_ranks, context), self._sizes[corner.data_ranks]
        around = len(self.stages[corner.pipeline]) * len(self._axes[tensor, context]) * len(self._again)
        every = len(grid.micro_batches())
        self.rejected[WHOLE_BATCH] += (every - len(sizes)) * around * len(shardings) * len(grid.experts())
        for expert in grid.experts():
            problems = [self.constraints.experts(expert, each.shard * context, each.zero_mode) for each in shardings]
            self._reject(problems, around * len(sizes))
            allowed = tuple(each for each, problem in zip(shardings, problems, strict=True) if problem is None)
            places, of_size = self._variants[tensor, context][expert]
            which = np.isin(of_size, sizes)
            if not allowed or not which.any():
                continue
            columns = tuple(self._column(tensor, expert, each.shard * context, each.replicate > 1) for each in allowed)
            micro_batches = grid.run.recipe.global_batch // (of_size[which] * corner.data_ranks)
            self.blocks.setdefault(corner.pipeline, []).append(Block(
                tensor, context, corner.pipeline, expert, corner.data_ranks, places[which], micro_batches, allowed,
                columns,
            ))  # fmt: skip

    def _column(self, *ranks: Any) -> int:
        return self.ranks.setdefault(ranks, len(self.ranks))

    def allowed(self, block: Block) -> Any:
        """Which layouts of a block the rules allow with each way to run its pipeline, [S, V, U]; others are counted."""
        import numpy as np

        ways, size = self.stages[block.pipeline], len(block.shardings)
        counts, inverse = np.unique(block.micro_batches, return_inverse=True)
        rounds = np.array([
            [each.schedule != "interleaved" or self.constraints.rounds(each.schedule, each.pipeline, int(count)) is None
             for count in counts] for each in ways
        ])[:, inverse]  # fmt: skip
        self.rejected[WHOLE_ROUNDS] += int((~rounds).sum()) * size
        again = self._numbers[block.variants]
        zero_mode = np.array([each.zero_mode for each in block.shardings])
        shares = np.ones((len(ways), len(self._again), len(ZERO_MODES)), bool)
        for way, each in enumerate(ways):
            for number, name in enumerate(self._again):
                count = int((rounds[way] & (again == number)).sum())
                for how in set(zero_mode.tolist()):
                    problem = self.constraints.zero_mode(how, each.schedule, each.pipeline, name)
                    shares[way, number, how] = problem is None
                    if problem is not None:
                        self._reject([problem], count * int((zero_mode == how).sum()))
        return rounds[:, :, None] & shares[:, again][:, :, zero_mode]

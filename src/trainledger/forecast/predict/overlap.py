"""Communication that overlaps compute on a rank, as `Layout.overlap` selects it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from trainledger.forecast.predict.stream_ops import BACKWARD, Timed, schedule_of
from trainledger.forecast.predict.streams import rank_seconds
from trainledger.ledger.entry import TO_EXPERTS, Entry
from trainledger.spec.layout import Layout, is_int, overlaps
from trainledger.spec.run import Run
from trainledger.spec.units import ceil_div

# What is summed or gathered once a step over ranks with their own optimizer state goes in buckets of so many elements,
# or so many for each rank: Megatron-LM, megatron/core/distributed/distributed_data_parallel.py (bucket_size).
BUCKET_ELEMENTS, BUCKET_ELEMENTS_PER_RANK = 40_000_000, 1_000_000


def in_buckets(run: Run) -> bool:
    """Whether gradients are summed once a step in buckets: DDP, and ZeRO-1."""
    return bool(run.layout.shard_ranks == 1 or run.layout.zero == 1)


def bucket_elements(ranks: int) -> int:
    """Elements of a bucket of an optimizer whose state is over so many ranks."""
    return max(BUCKET_ELEMENTS, BUCKET_ELEMENTS_PER_RANK * ranks)


def with_overlap(run: Run, timed: list[Timed]) -> list[Timed]:
    """The entries of a rank with what shows of their seconds."""
    if run.recipe.launch_blocking:
        return [_not_overlapped(each) for each in timed]
    if overlaps(run.layout, "tensor"):
        timed = _split_matmuls_overlapped(timed)
    if run.layout.gathers_again and run.layout.overlap is not None:
        timed = _regathers_overlapped(timed)
    if overlaps(run.layout, "parameters"):
        timed = _updated_parameters_overlapped(run, timed)
    if run.layout.overlap is None or (in_buckets(run) and not overlaps(run.layout, "gradients")):
        timed = [_not_overlapped(each) for each in timed]
    if overlaps_input_gradient_sums(run.layout):
        timed = _input_gradient_sums_overlapped(timed)
    return timed


def _not_overlapped(timed: Timed) -> Timed:
    """A sum of gradients, or a gather of parameters, that everything waits for."""
    entry = timed.entry
    if entry.kind != "collective" or entry.group in ("pipeline", "context"):
        return timed
    return timed._replace(entry=replace(entry, overlap=""))


def _split_matmuls_overlapped(timed: Sequence[Timed]) -> list[Timed]:
    """What tensor ranks gather for a matmul, or scatter of one, in as many parts as ranks: all but one overlap it."""
    # The matmuls that overlap it are those of one inner length next to the collective.
    found = list(timed)
    for at, each in enumerate(timed):
        entry = each.entry
        if entry.group == "tensor" and entry.name in ("all_gather", "reduce_scatter") and not entry.overlap:
            after = range(at + 1, len(timed)) if entry.name == "all_gather" else range(at - 1, -1, -1)
            compute = _matmul_seconds((timed[index] for index in after), entry)
            hidden = min(each.seconds, compute) * (1 - 1 / entry.ranks)
            found[at] = each._replace(seconds=each.seconds - hidden)
    return found


def _regathers_overlapped(timed: Sequence[Timed]) -> list[Timed]:
    """What tensor ranks gather again: only gradients of weights wait for it."""
    # It overlaps the matmuls of the input's gradient, half of those that read it (Megatron-LM,
    # core/tensor_parallel/layers.py, LinearWithGradAccumulationAndAsyncCommunication.backward: the gather is started,
    # the input's gradient computed, then the gather waited for; gradients of one input's weights are one matmul there).
    found = list(timed)
    for at, each in enumerate(timed):
        if each.entry.group == "tensor" and each.entry.overlap:
            compute = 0.0
            for row in timed[at + 1 :]:
                entry = row.entry
                if entry.name == "cat" and not compute:
                    continue  # what several sequences are brought together by, once they are there
                inside = entry.path.startswith(each.entry.path + ".") or entry.kind == "matmul"
                if entry.loop != each.entry.loop or entry.kind in ("collective", "attention") or not inside:
                    break
                compute += row.seconds / 2 if entry.kind == "matmul" else 0.0
            found[at] = each._replace(overlapped=min(each.seconds, compute))
    return found


def overlaps_input_gradient_sums(layout: Layout) -> bool:
    """Whether the sum of an input's gradient overlaps the matmuls of weights' gradients.

    Not where those matmuls have their sums in parts, and not in a zero-bubble pipeline, which leaves them for later.
    """
    requested = overlaps(layout, "input-gradients") and not overlaps(layout, "tensor")
    return requested and layout.schedule != "zero-bubble"


def _input_gradient_sums_overlapped(timed: Sequence[Timed]) -> list[Timed]:
    """Sums of an input's gradient over tensor ranks overlap the gradients of the weights that read it."""
    found = list(timed)
    entries = [each.entry for each in timed]
    for at, each in enumerate(timed):
        overlapping = matmuls_overlapping_sum(entries, at)
        if overlapping:
            compute = sum(timed[index].seconds for index in overlapping) / 2
            entry = replace(each.entry, overlap="compute")
            found[at] = each._replace(entry=entry, overlapped=min(each.seconds, compute))
    return found


def matmuls_overlapping_sum(entries: Sequence[Entry], at: int) -> list[int]:
    """The places of the matmuls of a backward whose gradients of an input are summed over tensor ranks at ``at``."""
    # Two of each weight: the gradients of inputs come first, the sum starts, and overlaps those of the weights. That is
    # a program with one matmul for all that read an input, as Megatron-LM's (core/tensor_parallel/layers.py,
    # LinearWithGradAccumulationAndAsyncCommunication.backward: the input's gradient is computed, its sum started, the
    # weight's gradient computed, the sum waited for). Matmuls from which other operations lead to the sum, as those of
    # experts, which give their tokens back first, do not overlap it.
    entry = entries[at]
    summed = entry.kind == "collective" and entry.name in ("all_reduce", "reduce_scatter") and entry.group == "tensor"
    if not summed or entry.phase != "backward" or not entry.path:
        return []
    found: dict[str, list[int]] = {}  # by module
    width = None  # of the input
    for index in range(at - 1, -1, -1):
        row = entries[index]
        inside = row.path == entry.path or row.path.startswith(entry.path + ".")
        if not inside or row.loop != entry.loop or row.phase != "backward" or row.kind in ("collective", "attention"):
            break
        if found and row.path == entry.path and row.path not in found and row.kind != "copy":
            break  # the activation, or what turns and attends
        if row.kind == "matmul":
            width = row.shape[2] if width is None else width
            if row.shape[2] is width or (is_int(width) and is_int(row.shape[2]) and row.shape[2] == width):
                found.setdefault(row.path, []).append(index)
    # A frozen weight has a gradient of its input alone.
    return [index for each in found.values() if len(each) % 2 == 0 for index in each]


def with_experts_overlapped(run: Run, timed: list[Timed], contention: float) -> list[Timed]:
    """Tokens on their way to experts and back overlap the same block of another micro-batch in the other pass."""
    # The sends of a forward overlap the block's backward, those of a backward its forward (DeepSeek-V3, section 3.2.1;
    # Megatron Core, combined_1f1b.py); compute loses its share of what is hidden. So it is in the rounds where both
    # run: micro-batches that are alone wait for all of it.
    if run.recipe.launch_blocking or not overlaps(run.layout, "experts"):
        return timed
    sent: dict[Any, list[float]] = {}  # by block: seconds of a forward and of a backward
    computed: dict[Any, list[float]] = {}
    for each in timed:
        if (key := _block(each.entry)) is None:
            continue
        of = sent if each.entry.group in TO_EXPERTS else None if each.entry.kind == "collective" else computed
        if of is not None:
            seconds = each.seconds * times_of(each.entry, 1)
            of.setdefault(key, [0.0, 0.0])[each.entry.phase in BACKWARD] += seconds
    shown: dict[Any, list[float]] = {}  # the share that is left
    for key, both in sent.items():
        compute = reversed(computed.get(key, (0.0, 0.0)))
        hidden = [min(mine, other) for mine, other in zip(both, compute, strict=True)]
        shown[key] = [
            1 - (1 - contention) * each / mine if mine else 1.0 for each, mine in zip(hidden, both, strict=True)
        ]
    return [
        each._replace(seconds=each.seconds * shown[_block(each.entry)][each.entry.phase in BACKWARD])
        if each.entry.group in TO_EXPERTS and _block(each.entry) is not None
        else each
        for each in timed
    ]


def _block(entry: Entry) -> Any:
    """What block an entry is of, where another micro-batch goes the other way; else None."""
    # Blocks are the rounds of a loop over layers, and those of other lists of modules.
    if not entry.loop or not entry.loop[0][0].startswith("micro-batches"):
        return None
    if len(entry.loop) > 1 and entry.loop[1][0].startswith("layers"):
        return entry.loop[:2]
    modules, _, rest = entry.path.partition(".")
    return (entry.loop[:1], modules) if rest.startswith("*") else None


def _matmul_seconds(rows: Iterable[Timed], collective: Entry) -> float:
    seconds, inner = 0.0, None
    for row in rows:
        entry = row.entry
        if entry.loop != collective.loop or entry.kind in ("collective", "attention"):
            break
        if entry.kind == "matmul" and len(entry.shape) == 4:
            if inner not in (None, entry.shape[3]):
                break
            inner = entry.shape[3]
            seconds += row.seconds
    return seconds


def _updated_parameters_overlapped(run: Run, timed: Sequence[Timed]) -> list[Timed]:
    """Parameters that others updated are gathered in buckets during the first forward: the first one is exposed."""
    rows = [each for each in timed if each.entry.phase == "forward"]
    forward = rank_seconds(schedule_of(rows, buckets=in_buckets(run))) / run.grad_accum
    found = []
    for each in timed:
        entry = each.entry
        if entry.name == "all_gather" and entry.phase == "optimizer":
            buckets = ceil_div(entry.payload, 2 * bucket_elements(entry.ranks))
            shown = max(each.seconds / buckets, each.seconds - forward)
            forward -= each.seconds - shown
            found.append(each._replace(seconds=shown))
        else:
            found.append(each)
    return found


def times_of(entry: Entry, depth: int = 0) -> Any:
    """How often an entry runs in a step, or in one round of its ``depth`` outer loops."""
    times: Any = 1
    for _, count in entry.loop[depth:]:
        times = times * count
    return times

"""What is wrong with a program, from what was seen while it ran: where, how much, why, and what to write instead."""

from __future__ import annotations

from collections.abc import Iterator

from trainledger.spec.units import counted, format_flops, format_nbytes
from trainledger.trace.annotate.annotation import PROBLEM, REMARK, Finding
from trainledger.trace.annotate.copies import DEVICE, EXPANDED, NON_CONTIGUOUS, REPEATED, Copy
from trainledger.trace.annotate.source import Files, Holder
from trainledger.trace.annotate.watcher import Watcher
from trainledger.trace.script import DONE, Ending

LEAST_OF_MOVED = 1 / 1000  # of all bytes that the program moves: smaller copies are not worth a word
LEAST_OF_PEAK = 1 / 100  # of the most that is live: smaller tensors are not worth a word
FEWEST_READS = 3
# What is a view where the elements lie in order, and says nothing of a copy where they do not. Matmuls copy too, but
# few can be written so that they do not.
_REORDERING = ("reshape", "flatten", "reshape_as", "ravel", "unflatten", "rearrange", "view", "")
_BEFORE_TRANSPOSING = (
    "reshape before transposing, or pass the transposed view to an operation that takes strides (matmul, bmm, sums); "
    "if the copy is needed, write .contiguous()"
)
_OF_MATMUL = "keep the operand in the order that the matmul needs; scaled_dot_product_attention takes any strides"
_IN_ORDER = {
    "contiguous": "leave it out if the next operation takes strides (matmul, sums, pointwise)",
    "einsum": "order the dims of the operands so that the summed ones are adjacent",
    **dict.fromkeys(("@", "matmul", "bmm"), _OF_MATMUL),
}
_FACTORIES = tuple(
    f".{each}("
    for each in ("zeros", "ones", "randn", "rand", "arange", "full", "empty", "randint", "tensor", "eye", "linspace")
)
_GRAPH = "graph kept alive"
_LONGEST_NAME = 40


class Weighed:
    """What small means in this program."""

    def __init__(self, watcher: Watcher) -> None:
        total = watcher.account.total
        self.copied = LEAST_OF_MOVED * (total.read + total.written)
        self.live = LEAST_OF_PEAK * watcher.peak_nbytes


def findings(watcher: Watcher, files: Files, holder: Holder | None, ending: Ending) -> tuple[Finding, ...]:
    """All findings, problems before remarks, and what costs the most bytes first, then the most times."""
    weighed = Weighed(watcher)
    found = [
        *_forgotten(watcher), *_graphs(watcher, holder), *_syncs(watcher, files), *_upcasts(watcher, weighed),
        *_copies(watcher, weighed), *_broadcasts(watcher, weighed), *_round_trips(watcher, weighed),
        *_loop_graphs(watcher, weighed, ending), *_forwards(watcher, weighed, ending),
    ]  # fmt: skip
    found.sort(key=lambda each: (each.weight != PROBLEM, -each.nbytes, -each.times))
    of_graphs = [each for each in found if each.kind == _GRAPH]
    again = [each for at, each in enumerate(of_graphs) if each.line in {other.line for other in of_graphs[:at]}]
    return tuple(each for each in found if each not in again)


def _forgotten(watcher: Watcher) -> Iterator[Finding]:
    clear = "set the .grad of each parameter to None" if watcher.updates.watches else "call optimizer.zero_grad()"
    for each in watcher.gradients.forgotten.values():
        yield Finding(
            "forgotten zero_grad", each.line,
            f"gradients of one step are added to those of the step before, {counted(each.times, 'time')}",
            f"the step at {each.step_line} used them, nothing cleared them, and the next step uses the sum",
            f"{clear} after the step, or before the first backward of the next",
            times=each.times, nbytes=each.nbytes * each.times,
        )  # fmt: skip


def _graphs(watcher: Watcher, holder: Holder | None) -> Iterator[Finding]:
    held = watcher.graph.leaks
    if held is None:
        return
    made = next((record.origin.line for record, _ in held.tensors if record.origin is not None), "")
    grown = _grown(watcher)
    what, line = f"the graphs of {held.spans} past steps are still alive", made
    if holder is not None:
        what, line = f"{what}: `{holder.name}` ({holder.kind}) holds their tensors", holder.line or made
    of = f", made at {made}" if made and made != line else ""
    yield Finding(
        _GRAPH, line, what,
        f"a tensor with a grad_fn keeps its whole graph alive{of}, and the tensors that no backward has freed: "
        f"{format_nbytes(grown) if grown > 0 else 'nodes of few bytes'} more with each step",
        _without_graph(holder, all(ref.numel() == 1 for _, each in held.tensors if (ref := each()) is not None)),
        times=held.spans, nbytes=max(0, grown) * held.spans,
    )  # fmt: skip


def _without_graph(holder: Holder | None, numbers: bool) -> str:
    """What to keep in place of a tensor with its graph, by the name that it is put in by."""
    added = holder.added if holder is not None and len(holder.added) <= _LONGEST_NAME else ""
    kept = f"`{added}.detach()`" if added.replace(".", "").replace("_", "").isalnum() else "`.detach()` of it"
    into = f" in `{holder.name}`" if holder is not None else ""
    return f"keep {kept}{into}" + (", or read numbers with .item() every few steps" if numbers else "")


def _loop_graphs(watcher: Watcher, weighed: Weighed, ending: Ending) -> Iterator[Finding]:
    for each in watcher.loops.never_used:
        if each.nbytes < weighed.live:
            continue
        holder = each.holder
        done = ending.outcome == DONE
        yield Finding(
            _GRAPH, holder.line or each.loop,
            f"`{holder.name}` ({holder.kind}) holds the graphs of {counted(each.iterations, 'iteration')} of the loop "
            f"at {each.loop}, and no backward uses them{'' if done else ' before the program ended'}",
            "a tensor with a grad_fn keeps its whole graph alive, and the tensors saved in it: "
            f"at least {format_nbytes(each.each)} more with each iteration",
            f"run evaluation under torch.no_grad(), or {_without_graph(holder, each.scalars)}",
            times=each.iterations, nbytes=each.nbytes, weight=PROBLEM if done else REMARK,
        )  # fmt: skip


def _forwards(watcher: Watcher, weighed: Weighed, ending: Ending) -> Iterator[Finding]:
    ended = ending.outcome == DONE
    for each in watcher.forwards.never_used(ended=ended, without=watcher.loops.unused_bounds):
        if each.grown < weighed.live:
            continue
        yield Finding(
            "unused graph", each.line,
            f"a forward of {counted(each.operations, 'matmul or attention call')} and {format_flops(each.flops)} "
            "records a graph, and no backward uses it",
            f"its nodes save tensors until the graph is freed: {format_nbytes(each.grown)} more are live after the "
            "last node than before the first",
            "run evaluation under torch.no_grad() or torch.inference_mode()",
            times=each.operations, nbytes=each.grown, weight=REMARK,
        )  # fmt: skip


def _of(copy: Copy, kind: str, what: str, why: str, instead: str, weight: str = PROBLEM) -> Finding:
    """A finding of copies at one expression, which ``what`` begins with."""
    return Finding(
        kind, copy.line, f"{copy.by} {what}", why, instead, copy.times, copy.nbytes, weight, copy.expression
    )  # fmt: skip


def _round_trips(watcher: Watcher, weighed: Weighed) -> Iterator[Finding]:
    for each in watcher.conversions.round_trips.values():
        if each.nbytes >= weighed.copied:
            yield _of(
                each, "conversion back and forth",
                f"turns {each.to}{each.shape} into {each.source_dtype} and back: {format_nbytes(each.nbytes)} in two "
                f"copies, {counted(each.times, 'time')}",
                f"every value of {each.to} is exact in {each.source_dtype}, so the result is unchanged",
                f"keep it in {each.to}",
            )  # fmt: skip


def _grown(watcher: Watcher) -> int:
    """Bytes of past steps that each further step left behind."""
    looks = watcher.graph.looks
    last, middle = looks[-1], looks[len(looks) // 2 - 1]
    return (last.nbytes - middle.nbytes) // max(1, last.step - middle.step)


def _syncs(watcher: Watcher, files: Files) -> Iterator[Finding]:
    steps = watcher.graph.steps
    accelerated = watcher.syncs.accelerated
    for each in watcher.syncs.waits():
        if each.inside:
            continue
        if steps:
            lasting = each.times >= FEWEST_READS and 2 * each.steps > steps
        else:
            file, _, line = each.caller_line.rpartition(":")
            lasting = each.times >= FEWEST_READS and files.shape(files.path(file)).in_loop(int(line))
        if not lasting:
            continue
        how = f"{each.times:,} times" + (f", in {each.steps} of {counted(steps, 'step')}" if steps else "")
        why = "the program waits there until the device has finished all queued work"
        if not accelerated:
            why += "; on this CPU it only reads the value"
        yield Finding(
            "synchronization in a loop", each.caller_line, f"{each.what} {how}", why,
            "keep the tensor (detached) and read it every few steps, or compare and count on the device",
            times=each.times, expression=each.what,
        )  # fmt: skip


def _upcasts(watcher: Watcher, weighed: Weighed) -> Iterator[Finding]:
    for each in watcher.conversions.upcasts.values():
        if each.of_loss and each.nbytes >= weighed.live * each.times:
            one = format_nbytes(each.nbytes // each.times)
            yield _of(
                each, "fp32 copy of logits",
                f"writes {each.source} out in fp32: {one}, {counted(each.times, 'time')}",
                "the loss reads it, and its softmax and gradient need as much again",
                "compute the loss over chunks of tokens, each converted to fp32 and checkpointed, or use a fused "
                "linear cross-entropy",
            )  # fmt: skip


def _copies(watcher: Watcher, weighed: Weighed) -> Iterator[Finding]:
    for line, account in watcher.account.lines.items():
        for (why, expression, inside, backward), copy in account.copies.items():
            if not line or backward or inside or copy.nbytes < weighed.copied or not copy.largest:
                continue
            if why == NON_CONTIGUOUS:
                yield _not_in_order(copy)
            elif why == EXPANDED or (why == REPEATED and copy.largest >= 2 * copy.source_nbytes):
                if copy.largest >= weighed.live:
                    yield _of(
                        copy, "broadcast written out",
                        f"writes {_amount(copy)}, from a tensor of {format_nbytes(copy.source_nbytes)}",
                        f"{copy.source} is repeated in memory",
                        "let it broadcast: expand() is free, and pointwise operations and matmul take it as it is",
                    )  # fmt: skip
            elif why == DEVICE and copy.times >= FEWEST_READS and any(each in expression for each in _FACTORIES):
                yield _of(
                    copy, "made on the host", f"moves {_amount(copy)} to the device",
                    "it is created in host memory and copied", "create it on the device: pass device= to that call",
                )  # fmt: skip


def _not_in_order(copy: Copy) -> Finding:
    remark = copy.asked or copy.call not in _REORDERING
    return _of(
        copy, "copy" if copy.asked else "hidden copy", f"copies {_amount(copy)}",
        f"{copy.source} has strides {list(copy.source_stride)}: its elements are not in the requested order",
        _IN_ORDER.get(copy.call, _BEFORE_TRANSPOSING), REMARK if remark else PROBLEM,
    )  # fmt: skip


def _broadcasts(watcher: Watcher, weighed: Weighed) -> Iterator[Finding]:
    for each in watcher.broadcasts.values():
        if each.largest >= 25 * weighed.live:  # a quarter of all there is
            yield _of(
                each, "broadcast written out",
                f"makes {each.shape} of {' and '.join(map(str, each.sources))}: {format_nbytes(each.largest)}, "
                f"{counted(each.times, 'time')}",
                "all pairs of elements are computed before they are summed",
                "write it as a matmul (einsum, torch.cdist), or compute it in chunks",
            )  # fmt: skip


def _amount(copy: Copy) -> str:
    if copy.times == 1:
        return f"{format_nbytes(copy.nbytes)}, once"
    return f"{format_nbytes(copy.largest)}, {copy.times:,} times: {format_nbytes(copy.nbytes)}"

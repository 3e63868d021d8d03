"""What is wrong with a program, from what was seen while it ran: where, how much, why, and what to write instead."""

from __future__ import annotations

from collections.abc import Iterator

from trainledger.annotate.annotation import PROBLEM, REMARK, Finding
from trainledger.annotate.copies import DEVICE, EXPANDED, NON_CONTIGUOUS, REPEATED, Copy
from trainledger.annotate.holders import Holder
from trainledger.annotate.script import DONE, Ending
from trainledger.annotate.source import Files
from trainledger.annotate.watcher import Watcher
from trainledger.units import counted, format_flops, format_nbytes

LEAST_OF_MOVED = 1 / 1000  # of all bytes that the program moves: smaller copies are not worth a word
LEAST_OF_PEAK = 1 / 100  # of the most that is live: smaller tensors are not worth a word
FEWEST_READS = 3
# What is a view where the elements lie in order, and says nothing of a copy where they do not. Products copy too, but
# few can be written so that they do not.
_REORDERING = ("reshape", "flatten", "reshape_as", "ravel", "unflatten", "rearrange", "view", "")


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
        *_copies(watcher, files, weighed), *_broadcasts(watcher, weighed), *_round_trips(watcher, weighed),
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
            f"the step at {each.step_line} has used them, nothing cleared them, and it uses the sum",
            f"{clear} after the step, or before the first backward of the next",
            times=each.times, nbytes=each.nbytes * each.times,
        )  # fmt: skip


def _graphs(watcher: Watcher, holder: Holder | None) -> Iterator[Finding]:
    held = watcher.graph.leaks
    if held is None:
        return
    made = next((record.origin.line for record, _ in held.tensors if record.origin is not None), "")
    grown = _grown(watcher)
    if holder is not None:
        line = holder.line or made
        what = (
            f"the graphs of {held.spans} past steps are still alive: `{holder.name}` ({holder.kind}) holds tensors of "
            "them"
        )
    else:
        what, line = f"the graphs of {held.spans} past steps are still alive", made
    of = f", made at {made}" if made and made != line else ""
    yield Finding(
        _GRAPH, line, what,
        f"a tensor with a grad_fn keeps all nodes it was computed by{of}, and tensors that no backward has released: "
        f"{format_nbytes(grown) if grown > 0 else 'few bytes, but nodes'} more with each step",
        _without_graph(holder, all(ref.numel() == 1 for _, each in held.tensors if (ref := each()) is not None)),
        times=held.spans, nbytes=max(0, grown) * held.spans,
    )  # fmt: skip


def _without_graph(holder: Holder | None, numbers: bool) -> str:
    """What to keep in place of a tensor with its graph, by the name that it is put in by."""
    added = holder.added if holder is not None and len(holder.added) <= _LONGEST_NAME else ""
    kept = f"`{added}.detach()`" if added.replace(".", "").replace("_", "").isalnum() else "`.detach()` of it"
    into = f" in `{holder.name}`" if holder is not None else ""
    return f"keep {kept}{into}" + (", or read numbers with .item() once in a while" if numbers else "")


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
            "a tensor with a grad_fn keeps all nodes it was computed by, and the tensors that they save: "
            f"at least {format_nbytes(each.each)} more with each iteration",
            f"run what is only evaluated under torch.no_grad(), or {_without_graph(holder, each.scalars)}",
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
            f"what its nodes save stays until the graph goes: {format_nbytes(each.grown)} more live after the last "
            "of them than before the first",
            "run what is only evaluated under torch.no_grad(), or torch.inference_mode()",
            times=each.operations, nbytes=each.grown, weight=REMARK,
        )  # fmt: skip


def _round_trips(watcher: Watcher, weighed: Weighed) -> Iterator[Finding]:
    for each in watcher.conversions.round_trips.values():
        if each.nbytes < weighed.copied:
            continue
        by = f"`{each.expression}`" if each.expression else "it"
        yield Finding(
            "conversion back and forth", each.line,
            f"{by} turns {each.to}{each.shape} into {each.source_dtype} and back: "
            f"{format_nbytes(each.nbytes)} in two copies, {counted(each.times, 'time')}",
            f"every value of {each.to} is one of {each.source_dtype} too: it comes back as it was",
            f"keep it in {each.to}",
            times=each.times, nbytes=each.nbytes, expression=each.expression,
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
        why = "the program waits there until all that is queued on the device is done"
        if not accelerated:
            why += "; on this CPU it only reads, on an accelerator it waits"
        yield Finding(
            "synchronization in a loop", each.caller_line, f"{each.what} {how}", why,
            "keep the tensor (detached) and read it every so many steps, or compare and count on the device",
            times=each.times, expression=each.what,
        )  # fmt: skip


def _upcasts(watcher: Watcher, weighed: Weighed) -> Iterator[Finding]:
    for each in watcher.conversions.upcasts.values():
        if not each.of_loss or each.nbytes < weighed.live * each.times:
            continue
        one = each.nbytes // each.times
        by = f"`{each.expression}`" if each.expression else "it"
        yield Finding(
            "fp32 copy of logits", each.line,
            f"{by} writes {each.source} out in fp32: {format_nbytes(one)}, {counted(each.times, 'time')}",
            "it goes to the loss, whose softmax and gradient take as much again",
            "take the loss over pieces of the tokens, each turned into fp32 alone and checkpointed, or a fused "
            "linear cross-entropy",
            times=each.times, nbytes=each.nbytes, expression=each.expression,
        )  # fmt: skip


def _copies(watcher: Watcher, files: Files, weighed: Weighed) -> Iterator[Finding]:
    for line, account in watcher.account.lines.items():
        if not line:
            continue
        for (why, expression, inside, backward), copy in account.copies.items():
            if backward or inside or copy.nbytes < weighed.copied or not copy.largest:
                continue
            if why == NON_CONTIGUOUS:
                yield _not_in_order(line, expression, copy)
            elif why == EXPANDED or (why == REPEATED and copy.largest >= 2 * copy.source_nbytes):
                if copy.largest >= weighed.live:
                    yield _written_out(line, expression, copy)
            elif why == DEVICE and copy.times >= FEWEST_READS and _made_there(expression):
                yield Finding(
                    "made on the host", line, f"`{expression}` moves {_amount(copy)} to the device",
                    "it is made in host memory first and copied", "make it there: pass device= to what makes it",
                    times=copy.times, nbytes=copy.nbytes, expression=expression,
                )  # fmt: skip


def _not_in_order(line: str, expression: str, copy: Copy) -> Finding:
    by = f"`{expression}`" if expression else copy.call or "it"
    remark = copy.asked or copy.call not in _REORDERING
    instead = {
        "contiguous": "leave it out where the next operation takes strides (matmul, sums, pointwise)",
        "einsum": "reorder the operands' dims so that those summed over lie together, or keep them so from the start",
        **dict.fromkeys(
            ("@", "matmul", "bmm"),
            "keep the operand in the order that the product needs; scaled_dot_product_attention takes any strides",
        ),
    }.get(
        copy.call,
        "reshape before the dims are turned, or hand the turned view to an operation that takes strides (matmul, "
        "bmm, sums); where the copy is needed, .contiguous() says so",
    )
    return Finding(
        "copy" if copy.asked else "hidden copy", line,
        f"{by} copies {_amount(copy)}",
        f"{copy.source} has strides {list(copy.source_stride)}: its elements do not lie in the order that is asked for",
        instead, times=copy.times, nbytes=copy.nbytes, weight=REMARK if remark else PROBLEM, expression=expression,
    )  # fmt: skip


def _written_out(line: str, expression: str, copy: Copy) -> Finding:
    by = f"`{expression}`" if expression else copy.call or "it"
    return Finding(
        "broadcast written out", line, f"{by} writes {_amount(copy)}, of {format_nbytes(copy.source_nbytes)} there are",
        f"{copy.source} is repeated in memory",
        "let it broadcast: expand() is free, and pointwise operations and matmul take it as it is",
        times=copy.times, nbytes=copy.nbytes, expression=expression,
    )  # fmt: skip


def _broadcasts(watcher: Watcher, weighed: Weighed) -> Iterator[Finding]:
    for each in watcher.broadcasts.values():
        if each.largest < 25 * weighed.live:  # a quarter of all there is
            continue
        sources = " and ".join(map(str, each.sources))
        yield Finding(
            "broadcast written out", each.line,
            f"`{each.expression}` makes {each.shape} of {sources}: {format_nbytes(each.largest)}, "
            f"{counted(each.times, 'time')}",
            "each element of both is combined with each of the other before anything is summed",
            "write it as a product (matmul, einsum, torch.cdist), or in pieces",
            times=each.times, nbytes=each.nbytes, expression=each.expression,
        )  # fmt: skip


def _amount(copy: Copy) -> str:
    if copy.times == 1:
        return f"{format_nbytes(copy.nbytes)}, once"
    return f"{format_nbytes(copy.largest)}, {copy.times:,} times: {format_nbytes(copy.nbytes)}"


_FACTORIES = tuple(
    f".{each}("
    for each in ("zeros", "ones", "randn", "rand", "arange", "full", "empty", "randint", "tensor", "eye", "linspace")
)


def _made_there(expression: str) -> bool:
    return any(each in expression for each in _FACTORIES)

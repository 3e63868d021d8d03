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
_FACTORIES = "zeros ones randn rand arange full empty randint tensor eye linspace"
_GRAPH, _BROADCAST = "graph kept alive", "broadcast written out"
_LONGEST_NAME = 40


def findings(watcher: Watcher, files: Files, holder: Holder | None, ending: Ending) -> tuple[Finding, ...]:
    """All findings, problems before remarks, and what costs the most bytes first, then the most times."""
    found = [*_forgotten(watcher), *_graphs(watcher, holder), *_syncs(watcher, files), *_upcasts(watcher)]
    found += [
        *_outliving(watcher),
        *_copies(watcher),
        *_round_trips(watcher),
        *_loop_graphs(watcher, ending),
        *_forwards(watcher, ending),
        *watcher.habits.findings(),
    ]
    found.sort(key=lambda finding: (finding.weight != PROBLEM, -finding.nbytes, -finding.times))
    graph_lines: set[str] = set()
    kept = []
    for finding in found:  # of the graphs that a line keeps alive, the largest
        if finding.kind != _GRAPH or finding.line not in graph_lines:
            kept.append(finding)
        graph_lines |= {finding.line} if finding.kind == _GRAPH else set()
    return tuple(kept)


def _least_copied(watcher: Watcher) -> float:
    return LEAST_OF_MOVED * watcher.account.total.moved


def _least_live(watcher: Watcher) -> float:
    return LEAST_OF_PEAK * watcher.peak_nbytes


def _forgotten(watcher: Watcher) -> Iterator[Finding]:
    clear = "set the .grad of each parameter to None" if watcher.updates.watches else "call optimizer.zero_grad()"
    for sums in watcher.gradients.forgotten.values():
        what = f"gradients of one step are added to those of the step before, {counted(sums.times, 'time')}"
        why = f"the step at {sums.step_line} used them, nothing cleared them, and the next step uses the sum"
        instead = f"{clear} after the step, or before the first backward of the next"
        yield Finding("forgotten zero_grad", sums.line, what, why, instead, sums.times, sums.nbytes * sums.times)


def _graphs(watcher: Watcher, holder: Holder | None) -> Iterator[Finding]:
    held = watcher.graph.leaks
    if held is None:
        return
    made = next((record.origin.line for record, _ in held.tensors if record.origin is not None), "")
    looks = watcher.graph.looks
    last, middle = looks[-1], looks[len(looks) // 2 - 1]
    grown = (last.nbytes - middle.nbytes) // max(1, last.step - middle.step)  # of past steps, with each further one
    what, line = f"the graphs of {held.spans} past steps are still alive", made
    if holder is not None:
        what, line = f"{what}: `{holder.name}` ({holder.kind}) holds their tensors", holder.line or made
    of = f", made at {made}" if made and made != line else ""
    why = (
        f"a tensor with a grad_fn keeps its whole graph alive{of}, and the tensors that no backward has freed: "
        f"{format_nbytes(grown) if grown > 0 else 'nodes of few bytes'} more with each step"
    )
    numbers = all(ref.numel() == 1 for _, tensor in held.tensors if (ref := tensor()) is not None)
    yield Finding(_GRAPH, line, what, why, _without_graph(holder, numbers), held.spans, max(0, grown) * held.spans)


def _without_graph(holder: Holder | None, numbers: bool) -> str:
    """What to keep in place of a tensor with its graph, by the name that it is put in by."""
    added = holder.added if holder is not None and len(holder.added) <= _LONGEST_NAME else ""
    kept = f"`{added}.detach()`" if added.replace(".", "").replace("_", "").isalnum() else "`.detach()` of it"
    into = f" in `{holder.name}`" if holder is not None else ""
    return f"keep {kept}{into}" + (", or read numbers with .item() every few steps" if numbers else "")


def _outliving(watcher: Watcher) -> Iterator[Finding]:
    for held in watcher.outliving.found.values():
        if held.times:
            size = f"{format_nbytes(held.nbytes)}, {counted(held.times, 'time')}"
            what = f"`{held.name}` holds a tensor of the step before while the next step makes its successor: {size}"
            why = "a variable keeps its tensor until it is assigned anew, so that two are live at once"
            instead = (
                f"`del {held.name}` after the backward, or take the step in a function whose variables end with it"
            )
            yield Finding("kept over the step", held.line, what, why, instead, held.times, held.nbytes, weight=REMARK)


def _loop_graphs(watcher: Watcher, ending: Ending) -> Iterator[Finding]:
    done = ending.outcome == DONE
    for kept in watcher.loops.never_used:
        if kept.nbytes < _least_live(watcher):
            continue
        what = (
            f"`{kept.holder.name}` ({kept.holder.kind}) holds the graphs of {counted(kept.iterations, 'iteration')} of "
            f"the loop at {kept.loop}, and no backward uses them{'' if done else ' before the program ended'}"
        )
        why = (
            "a tensor with a grad_fn keeps its whole graph alive, and the tensors saved in it: "
            f"at least {format_nbytes(kept.each)} more with each iteration"
        )
        instead = f"run evaluation under torch.no_grad(), or {_without_graph(kept.holder, kept.scalars)}"
        line, weight = kept.holder.line or kept.loop, PROBLEM if done else REMARK
        yield Finding(_GRAPH, line, what, why, instead, kept.iterations, kept.nbytes, weight)


def _forwards(watcher: Watcher, ending: Ending) -> Iterator[Finding]:
    forwards = watcher.forwards.never_used(ended=ending.outcome == DONE, without=watcher.loops.unused_bounds)
    for forward in forwards:
        if forward.grown < _least_live(watcher):
            continue
        what = (
            f"a forward of {counted(forward.operations, 'matmul or attention call')} and "
            f"{format_flops(forward.flops)} records a graph, and no backward uses it"
        )
        why = (
            f"its nodes save tensors until the graph is freed: {format_nbytes(forward.grown)} more are live after the "
            "last node than before the first"
        )
        instead = "run evaluation under torch.no_grad() or torch.inference_mode()"
        yield Finding(
            "unused graph", forward.line, what, why, instead, forward.operations, forward.grown, weight=REMARK
        )


def _syncs(watcher: Watcher, files: Files) -> Iterator[Finding]:
    steps = watcher.graph.steps
    why = "the program waits there until the device has finished all queued work"
    why += "" if watcher.syncs.accelerated else "; on this CPU it only reads the value"
    instead = "keep the tensor (detached) and read it every few steps, or compare and count on the device"
    for sync in watcher.syncs.waits():
        file, _, line = sync.caller_line.rpartition(":")
        repeats = 2 * sync.steps > steps if steps else files.shape(files.path(file)).in_loop(int(line))
        if sync.inside or sync.times < FEWEST_READS or not repeats:
            continue
        what = f"{sync.what} {sync.times:,} times" + (f", in {sync.steps} of {counted(steps, 'step')}" if steps else "")
        where = sync.caller_line
        yield Finding("synchronization in a loop", where, what, why, instead, sync.times, expression=sync.what)


def _of(copy: Copy, kind: str, what: str, why: str, instead: str, weight: str = PROBLEM) -> Finding:
    """A finding of copies at one expression, which ``what`` begins with."""
    return Finding(kind, copy.line, f"{copy.by} {what}", why, instead, copy.times, copy.nbytes, weight, copy.expression)


def _upcasts(watcher: Watcher) -> Iterator[Finding]:
    for copy in watcher.conversions.upcasts.values():
        if copy.of_loss and copy.nbytes >= _least_live(watcher) * copy.times:
            size = format_nbytes(copy.nbytes // copy.times)
            what = f"writes {copy.source} out in fp32: {size}, {counted(copy.times, 'time')}"
            why = "the loss reads it, and its softmax and gradient need as much again"
            instead = "compute the loss over chunks of tokens, each converted to fp32 and checkpointed, or use a fused "
            yield _of(copy, "fp32 copy of logits", what, why, instead + "linear cross-entropy")


def _round_trips(watcher: Watcher) -> Iterator[Finding]:
    for copy in watcher.conversions.round_trips.values():
        if copy.nbytes >= _least_copied(watcher):
            pair = f"{format_nbytes(copy.nbytes)} in two copies, {counted(copy.times, 'time')}"
            what = f"turns {copy.to}{copy.shape} into {copy.source_dtype} and back: {pair}"
            why = f"every value of {copy.to} is exact in {copy.source_dtype}, so the result is unchanged"
            yield _of(copy, "conversion back and forth", what, why, f"keep it in {copy.to}")


def _copies(watcher: Watcher) -> Iterator[Finding]:
    for line, account in watcher.account.lines.items():
        for (why, expression, inside, backward), copy in account.copies.items():
            if not line or backward or inside or copy.nbytes < _least_copied(watcher) or not copy.largest:
                continue
            if why == NON_CONTIGUOUS:
                yield _not_in_order(copy)
            elif why == EXPANDED or (why == REPEATED and copy.largest >= 2 * copy.source_nbytes):
                if copy.largest >= _least_live(watcher):
                    what = f"writes {_amount(copy)}, from a tensor of {format_nbytes(copy.source_nbytes)}"
                    instead = "let it broadcast: expand() is free, and pointwise operations and matmul take it as it is"
                    yield _of(copy, _BROADCAST, what, f"{copy.source} is repeated in memory", instead)
            elif why == DEVICE and copy.times >= FEWEST_READS and _makes(expression):
                reason, instead = "it is created in host memory and copied", "pass device= to that call"
                what = f"moves {_amount(copy)} to the device"
                yield _of(copy, "made on the host", what, reason, f"create it on the device: {instead}")
    for copy in watcher.broadcasts.values():
        if copy.largest >= 25 * _least_live(watcher):  # a quarter of all there is
            size = f"{format_nbytes(copy.largest)}, {counted(copy.times, 'time')}"
            what = f"makes {copy.shape} of {' and '.join(map(str, copy.sources))}: {size}"
            reason = "all pairs of elements are computed before they are summed"
            instead = "write it as a matmul (einsum, torch.cdist), or compute it in chunks"
            yield _of(copy, _BROADCAST, what, reason, instead)


def _makes(expression: str) -> bool:
    return any(f".{factory}(" in expression for factory in _FACTORIES.split())


def _not_in_order(copy: Copy) -> Finding:
    kind = "copy" if copy.asked else "hidden copy"
    why = f"{copy.source} has strides {list(copy.source_stride)}: its elements are not in the requested order"
    weight = REMARK if copy.asked or copy.call not in _REORDERING else PROBLEM
    return _of(copy, kind, f"copies {_amount(copy)}", why, _IN_ORDER.get(copy.call, _BEFORE_TRANSPOSING), weight)


def _amount(copy: Copy) -> str:
    if copy.times == 1:
        return f"{format_nbytes(copy.nbytes)}, once"
    return f"{format_nbytes(copy.largest)}, {copy.times:,} times: {format_nbytes(copy.nbytes)}"

"""The books of an annotation: lines sum to the total, and the total is what a recorder without lines sees."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from trainledger.ledger.ledger import Ledger
from trainledger.trace.annotate.annotate import annotate
from trainledger.trace.annotate.annotation import Annotation, Work
from trainledger.trace.recorder.recorder import Recorder

torch.set_num_threads(1)
AMOUNTS = ("flops", "read", "written")


def summed(annotation: Annotation) -> Work:
    total = annotation.elsewhere
    for file in annotation.files:
        for line in file.lines:
            total += line.work
    return total


def recorded(program: Callable[[], object]) -> Ledger:
    with Recorder(nn.Module(), find_phases=True) as recorder:
        program()
    return recorder.ledger(tokens=0, writer="trace")


def layers(widths: Sequence[int], *, optimizer: bool = True, again: bool = False, half: bool = False) -> None:
    """One step of a chain of layers."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(a, b) for a, b in pairwise(widths)))
    x = torch.randn(8, widths[0])
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=half):
        for layer in model:
            block = nn.Sequential(layer, nn.GELU())
            x = checkpoint(block, x, use_reentrant=False) if again else block(x)
    loss = F.mse_loss(x.float(), torch.zeros(8, widths[-1]))
    loss.backward()
    if optimizer:
        torch.optim.AdamW(model.parameters()).step()


def views_and_copies() -> None:
    x = torch.arange(24.0).view(4, 6)
    y = x.t().reshape(-1)
    z = torch.cat([y, y])
    z[::2] += 1
    del y
    total = z.view(2, 24).t().contiguous().sum()
    assert total > 0


def attention() -> None:
    q = torch.randn(2, 4, 16, 8, requires_grad=True)
    F.scaled_dot_product_attention(q, q, q, is_causal=True).sum().backward()


PROGRAMS: list[Callable[[], None]] = [
    lambda: layers([16, 32, 4]), lambda: layers([16, 32, 4], again=True), lambda: layers([16, 8], half=True),
    views_and_copies, attention,
]  # fmt: skip


@pytest.mark.parametrize("program", PROGRAMS, ids=["layers", "recomputed", "half", "views", "attention"])
def test_lines_sum_to_the_total_and_the_total_is_the_ledgers(program: Callable[[], None]) -> None:
    annotation = annotate(program)
    assert annotation.ended == ""
    assert summed(annotation) == annotation.total
    ledger = recorded(program)
    for amount in AMOUNTS:
        assert getattr(annotation.total, amount) == ledger.total(amount), amount
    assert annotation.total.operations == len(ledger)
    assert annotation.total.allocated == sum(nbytes for each in ledger for _, nbytes in each.allocated)
    assert annotation.peak_nbytes == ledger.peak().nbytes
    assert annotation.uncounted == ()


@settings(max_examples=12, deadline=None)
@given(widths=st.lists(st.integers(1, 40), min_size=2, max_size=5), again=st.booleans(), half=st.booleans())
def test_books_of_any_chain(widths: list[int], again: bool, half: bool) -> None:
    annotation = annotate(layers, [widths], files=())
    other = annotate(lambda: layers(widths, again=again, half=half))
    ledger = recorded(lambda: layers(widths, again=again, half=half))
    assert summed(other) == other.total
    assert (other.total.flops, other.peak_nbytes) == (ledger.flops, ledger.peak().nbytes)
    with FlopCounterMode(display=False) as counter:
        layers(widths)
    matmuls = recorded(lambda: layers(widths)).matmul_flops
    assert matmuls == counter.get_total_flops()
    assert annotation.total.flops >= matmuls


def test_backward_and_recomputation_stand_at_the_forwards_line() -> None:
    here = layers.__code__.co_firstlineno
    layer_line, loss_line, backward_line = here + 8, here + 9, here + 10
    plain, again = annotate(lambda: layers([16, 32])), annotate(lambda: layers([16, 32], again=True))
    matmul, made = 2 * 8 * 16 * 32, 8 * 32
    line = plain.line(layer_line)
    # The input needs no gradient: backward is one matmul, the sum of the bias, and the GELU's.
    assert (line.own.flops, line.backward.flops, line.recompute.operations) == (matmul + made, matmul + 2 * made, 0)
    # What the GELU made is not needed for its backward, so that it is not computed again.
    assert again.line(layer_line).recompute.flops == matmul
    assert again.line(layer_line).own.flops == matmul + made
    assert plain.line(loss_line).own.flops > 0
    caller = plain.line(backward_line)
    assert caller.own.flops == 0
    ran = next(each for each in caller.marks if each.kind == "backward")
    elsewhere = [each for each in plain.files[0].lines if each.number != backward_line]
    assert ran.times == sum(each.backward.operations for each in elsewhere)


def test_alive_is_what_lives_when_the_line_is_done() -> None:
    kept: list[Tensor] = []

    def program() -> None:
        x = torch.zeros(10, 10)
        for _ in range(3):
            y = x + 1
            kept.append(y * 2)
        z = (x + x).sum()
        del x, z

    annotation = annotate(program)
    first = program.__code__.co_firstlineno
    alive = {number - first: annotation.line(number) for number in range(first + 1, first + 7)}
    assert [alive[each].alive for each in (1, 3, 4, 5)] == [400, 400, 1200, 4]
    assert [alive[each].at_end for each in (1, 3, 4, 5)] == [0, 0, 1200, 0]
    assert [alive[each].runs for each in (1, 2, 3, 4, 5)] == [1, 4, 3, 3, 1]
    assert alive[4].own.allocated == 1200
    loop = next(each for each in alive[2].marks if each.kind == "loop")
    assert loop.times == 3
    assert loop.nbytes == 400  # what each iteration leaves behind
    assert annotation.live_nbytes == sum(each.untyped_storage().nbytes() for each in kept) == 1200


def test_a_steady_loop_leaves_nothing_behind() -> None:
    def program() -> None:
        x = torch.zeros(10, 10)
        for _ in range(5):
            x = x + 1

    annotation = annotate(program)
    loop = next(each for each in annotation.line(program.__code__.co_firstlineno + 2).marks if each.kind == "loop")
    assert (loop.times, loop.nbytes) == (5, 0)


def test_what_was_there_before_counts_for_the_peak() -> None:
    x = torch.zeros(1000)

    def program(x: Tensor) -> None:
        (x * 2).sum()

    assert annotate(program, [x]).peak_nbytes == 4000 + 4000 + 4


def test_tensors_are_told_when_asked_for() -> None:
    def program() -> None:
        x = torch.zeros(4, 8)
        x.t().contiguous()

    line = program.__code__.co_firstlineno + 2
    shown = annotate(program, shapes=True).line(line).tensors
    assert [(each.operation, each.kind, each.shape, each.stride, each.contiguous) for each in shown] == [
        ("t", "view", (8, 4), (1, 8), False), ("clone", "copy", (8, 4), (4, 1), True),
    ]  # fmt: skip
    assert annotate(program).line(line).tensors == ()


def test_operations_without_a_rule_are_told_with_their_line() -> None:
    @torch.library.custom_op("annotate_test::twice", mutates_args=())
    def twice(x: Tensor) -> Tensor:
        return x * 2

    def program() -> None:
        x = torch.ones(8)
        for _ in range(3):
            twice(x)

    ((name, times, line),) = annotate(program).uncounted
    assert (name, times) == ("annotate_test::twice", 3)
    assert line.endswith(f":{program.__code__.co_firstlineno + 3}")


@pytest.mark.long
def test_a_long_program_is_not_kept_in_memory() -> None:
    from trainledger.trace.annotate.watcher import Steps, Watcher

    seen: list[Watcher] = []
    made = Steps.__init__

    def init(self: Steps, watcher: Watcher, *rest: object) -> None:
        seen.append(watcher)
        made(self, watcher, *rest)  # type: ignore[arg-type]

    def program(steps: int) -> None:
        weight = torch.ones(4, requires_grad=True)
        optimizer = torch.optim.SGD([weight], lr=0.1)
        for _ in range(steps):
            optimizer.zero_grad()
            (weight * 2).exp().sum().backward()
            optimizer.step()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Steps, "__init__", init)
        long, longer = annotate(program, [64]), annotate(program, [128])
    sizes = [
        (
            len(each.recorder.events),
            len(each.recorder.storages._every),
            len(each.recorder.attribution._here.thread.line_of_node),
        )
        for each in seen
    ]
    assert sizes[0] == sizes[1]
    assert sizes[0][0] <= 1
    assert longer.total.operations == pytest.approx(2 * long.total.operations, rel=0.1)
    assert all(each.backward.flops > 0 for each in (long.line(program.__code__.co_firstlineno + 5),))

"""The account of one optimizer step in closed form: no torch, no values, only sizes."""

from __future__ import annotations

from trainledger.ledger.core.graph import Array
from trainledger.ledger.core.leaves import ModelLeaves
from trainledger.ledger.core.sizes import is_zero, sizes_of
from trainledger.ledger.core.tape import Tape
from trainledger.ledger.entry import Amounts, Int
from trainledger.ledger.ledger import Ledger
from trainledger.ledger.memory.compiled_blocks import hooks_of
from trainledger.ledger.model.forward import buffers_nbytes
from trainledger.ledger.model.lora import frozen_nbytes
from trainledger.ledger.optimizers.mixed_precision import (
    adapt_scale,
    main_gradients,
    own_nbytes,
    read_overflow,
    round_back,
    set_formats,
    unscale,
)
from trainledger.ledger.optimizers.update import clip, state_nbytes, update
from trainledger.ledger.parallel.micro_batches import Work, run_micro_batches
from trainledger.ledger.parallel.rank_plan import RankPlan, rank_plan
from trainledger.ledger.parallel.reduction import bucket_nbytes, gather_updated, sum_norms, sum_tied_embedding
from trainledger.spec.run import Run


def account(run: Run, *, backend: str = "cpu") -> Ledger:
    """The ledger of one steady-state optimizer step of one device.

    Steady state: the optimizer's state exists, gradients do not. ``backend`` (of `spec.kernels.KERNELS`) says which
    kernels run; the CPU's are witnessed by the trace operation by operation. Left out: the allocator's rounding,
    library workspaces, and everything that the device's context takes.

    The spec's and the recipe's sizes may be arrays (one account for each element) or symbols (formulas), head counts
    excepted: they decide which operations run. So do a single micro-batch and, in written-out attention, a batch of
    one: symbols, and arrays that hold other elements too, stand there for two and more; symbols for two blocks as well.

    Of a run spread over devices this is the first rank: of its first stage, and where pieces are uneven with the
    largest; `ledger.ranks.accounts` has them all.
    """
    return follow(rank_plan(run), backend=backend)


def follow(rank: RankPlan, *, backend: str) -> Ledger:
    """The ledger of one rank of a layout."""
    run, precision = rank.run, rank.run.recipe.precision
    recipe = run.recipe
    hooks, note = hooks_of(rank) if recipe.compile else ((), "")
    tape = Tape(precision, backend, hooks)
    sizes = sizes_of(run, backend)
    works = tuple(Work(tape, rank, sizes, each) for each in rank.chunks)
    leaves = rank.owned
    set_formats(leaves, precision)
    for each in works:
        each.step_begins()
    total = run_micro_batches(works)
    for each in works:
        each.step_ends()
    for held_by in (leaves,) if rank.gathers else (each.leaves for each in works):
        sum_tied_embedding(tape, rank, held_by)
    held: list[Array] = []
    gradients: list[Array] = []
    if precision.master and not precision.gradient_buffers:
        whole = not rank.sharded and not any(each.buffered for each in works)
        gradients = main_gradients(tape, leaves, whole=whole)
        for each in works:
            each.drop_gradients()
    found = unscale(tape, leaves) if precision.loss_scaling else None
    if recipe.grad_clip is not None:
        with tape.during("clip"):
            sum_norms(tape, rank, leaves.tensors())
            held = clip(tape, leaves, foreach=backend != "cpu")
    with tape.during("optimizer"):
        if found is not None:
            read_overflow(tape, found)
        update(tape, leaves, recipe)
        if precision.master:
            round_back(tape, leaves)
            gradients.clear()
        if found is not None:
            adapt_scale(tape, found)
    if rank.sharded and not rank.gathers:
        gather_updated(tape, rank, leaves)
    del total, held, found
    tokens = run.device_batch * run.grad_accum * recipe.seq_len
    return tape.ledger(
        resident=resident_of(rank, works, leaves, tokens),
        parameters=sum(each.leaves.elements() for each in works) if not rank.gathers else leaves.elements(),
        tokens=tokens,
        micro_batches=run.grad_accum,
        notes=(note,) if note else (),
    )


def resident_of(rank: RankPlan, works: tuple[Work, ...], owned: ModelLeaves, tokens: Int) -> Amounts:
    """What a rank holds before a step of so many tokens, by category."""
    recipe, precision = rank.run.recipe, rank.run.recipe.precision
    base_format = None if recipe.lora is None else recipe.lora.base_format
    resident = [
        ("parameters", sum(each.parameters_nbytes for each in works)),
        ("frozen weights", frozen_nbytes(owned, base_format, precision.parameters)),
        ("gradients", sum(each.buffers_nbytes for each in works)),
        ("optimizer state", state_nbytes(owned, recipe) + own_nbytes(owned, precision)),
        ("batch", 16 * tokens),
        ("communication", bucket_nbytes(rank, owned, precision.gradients)),
        ("buffers", buffers_nbytes(rank.run.model) + sum(each.copies_nbytes for each in works)),
    ]
    return tuple((name, nbytes) for name, nbytes in resident if not is_zero(nbytes))

"""The account of one optimizer step in closed form: no torch, no values, only sizes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from trainledger.ledger.core.graph import Array
from trainledger.ledger.core.leaves import ModelLeaves
from trainledger.ledger.core.sizes import is_zero, sizes_of
from trainledger.ledger.core.tape import Tape
from trainledger.ledger.entry import Amounts, Int
from trainledger.ledger.ledger import Ledger
from trainledger.ledger.memory.compiled_blocks import hooks_of
from trainledger.ledger.memory.reserved import reserved
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
from trainledger.spec.dtypes import nbytes_in
from trainledger.spec.precision import Precision
from trainledger.spec.run import Run


def account(run: Run, *, backend: str = "cpu") -> Ledger:
    """The ledger of one steady-state optimizer step of one device.

    Steady state: the optimizer's state exists, gradients do not. ``backend`` (of `spec.device.KERNELS`) says which
    kernels run; the CPU's are compared with the trace operation by operation. Left out: the allocator's rounding,
    library workspaces, and everything that the device's context takes.

    The spec's and the recipe's sizes may be arrays (one account for each element) or symbols (formulas), head counts
    excepted: they decide which operations run. So do a single micro-batch and, in unfused attention, a batch of
    one: symbols, and arrays with other elements too, mean two and more there; symbols mean two blocks as well.

    Of a run spread over devices this is the first rank: of its first stage, and where pieces are uneven with the
    largest; `ledger.ranks.accounts` has them all.
    """
    return follow(rank_plan(run), backend=backend)


def follow(rank: RankPlan, *, backend: str) -> Ledger:
    """The ledger of one rank of a layout."""
    return follow_places((rank,), backend=backend)[0]


def follow_places(ranks: Sequence[RankPlan], *, backend: str) -> tuple[Ledger, ...]:
    """The ledgers of ranks of a stage with pieces of different sizes: only their updates differ."""
    rank = ranks[0]
    precision, recipe = rank.run.recipe.precision, rank.run.recipe
    if len(ranks) > 1 and (recipe.compile or _copies_gradients(precision)):  # their updates change what was before
        return tuple(follow(each, backend=backend) for each in ranks)
    hooks, note = hooks_of(rank) if recipe.compile or recipe.of_megatron else ((), "")
    tape = Tape(precision, backend, hooks)
    sizes = sizes_of(rank.run, backend)
    works = tuple(Work(tape, rank, sizes, each) for each in rank.chunks)
    for each in ranks:
        set_formats(each.owned, precision)
    for work in works:
        work.step_begins()
    total = run_micro_batches(works)
    for work in works:
        work.step_ends()
    before, found = tape.events, []
    for each in ranks:
        if len(ranks) > 1:
            tape.events = [*before[:-1], before[-1].copy()]  # the last one frees what is gone before the next
        _update(tape, each, works, total)
        leaves, tokens = each.owned, rank.run.device_batch * rank.run.grad_accum * recipe.seq_len
        ledger = tape.ledger(
            resident=resident_of(each, works, leaves, tokens),
            parameters=leaves.elements() if rank.gathers else sum(work.leaves.elements() for work in works),
            tokens=tokens,
            micro_batches=rank.run.grad_accum,
            notes=(note,) if note else (),
        )
        found.append(replace(ledger, reserved=reserved(each, ledger, backend=backend)))
    return tuple(found)


def _copies_gradients(precision: Precision) -> bool:
    """Whether an update begins with gradients in the master copy's format, and frees the original ones."""
    return bool(precision.master) and not precision.gradient_buffers


def _update(tape: Tape, rank: RankPlan, works: tuple[Work, ...], loss: Array | None) -> None:
    """The step after the last micro-batch: clip gradients and update parameters."""
    recipe, precision, leaves = rank.run.recipe, rank.run.recipe.precision, rank.owned
    for held_by in (leaves,) if rank.gathers else (each.leaves for each in works):
        sum_tied_embedding(tape, rank, held_by)
    held: list[Array] = []
    gradients: list[Array] = []
    if _copies_gradients(precision):
        whole = not rank.sharded and not any(each.buffered for each in works)
        gradients = main_gradients(tape, leaves, whole=whole)
        for each in works:
            each.drop_gradients()
    found = unscale(tape, leaves) if precision.loss_scaling else None
    if recipe.grad_clip is not None:
        with tape.during("clip"):
            sum_norms(tape, rank, leaves)
            held = clip(tape, leaves, foreach=tape.backend != "cpu")
    with tape.during("optimizer"):
        if found is not None:
            read_overflow(tape, found)
        update(tape, leaves, recipe, rank.group if rank.gathers else None)
        if precision.master:
            round_back(tape, leaves)
            gradients.clear()
        if found is not None:
            adapt_scale(tape, found)
    if rank.sharded and not rank.gathers:
        gather_updated(tape, rank, [each.leaves for each in works])
    if loss is not None and loss.memory is not None:  # the step has it to here
        tape.released(loss.memory.record)
    del held, found


def batch_nbytes(rank: RankPlan) -> Int:
    """Megatron-LM's tensors of a micro-batch: ids, labels, positions, the mask of the loss in fp32, that of attention.

    A byte for each query and key of a sequence (megatron/training/datasets, ``create_attention_mask``).
    """
    run = rank.run
    tokens = run.device_batch * run.rank_tokens
    return 28 * tokens + tokens * run.recipe.seq_len


def _buffers(rank: RankPlan) -> Int:
    """The model's own, and of Megatron-LM without Transformer Engine one for the scores of attention, which stays.

    (core/transformer/dot_product_attention.py, ``get_global_memory_buffer``.)
    """
    run, nbytes = rank.run, buffers_nbytes(rank.run.model)
    if run.recipe.framework != "megatron-local" or run.recipe.attention != "math":
        return nbytes
    scores = run.device_batch * run.model.attention.n_heads * run.rank_tokens * run.recipe.seq_len
    return nbytes + nbytes_in(scores, run.recipe.precision.compute)


def resident_of(rank: RankPlan, works: tuple[Work, ...], owned: ModelLeaves, tokens: Int) -> Amounts:
    """The memory of a rank before a step of so many tokens, by category."""
    recipe, precision = rank.run.recipe, rank.run.recipe.precision
    base_format = None if recipe.lora is None else recipe.lora.base_format
    resident = [
        ("parameters", sum(each.parameters_nbytes for each in works)),
        ("frozen weights", frozen_nbytes(owned, base_format, precision.parameters)),
        ("gradients", sum(each.buffers_nbytes for each in works)),
        ("optimizer state", state_nbytes(owned, recipe) + own_nbytes(owned, precision)),
        ("batch", batch_nbytes(rank) if recipe.of_megatron else 16 * tokens),
        ("communication", 0 if recipe.of_megatron else bucket_nbytes(rank, owned, precision.gradients)),
        ("buffers", _buffers(rank) + sum(each.copies_nbytes for each in works)),
    ]
    return tuple((name, nbytes) for name, nbytes in resident if not is_zero(nbytes))

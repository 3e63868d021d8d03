"""The account of one optimizer step in closed form: no torch, no values, only sizes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace

from trainledger.ledger.core.graph import Array, ModelLeaves
from trainledger.ledger.core.recording import Hook
from trainledger.ledger.core.sizes import is_zero, sizes_of
from trainledger.ledger.core.tape import Tape
from trainledger.ledger.entry import GRADIENTS_ON_HOST, HOST, STATES_ON_HOST, Amounts, Int
from trainledger.ledger.ledger import Ledger
from trainledger.ledger.memory.compiled_blocks import hooks_of, uncovered
from trainledger.ledger.memory.compiled_schedule import Kernels
from trainledger.ledger.memory.timeline import peak_nbytes
from trainledger.ledger.memory.xla import WholeStep
from trainledger.ledger.model.forward import buffers_nbytes
from trainledger.ledger.optimizers.states import (
    adapt_scale,
    main_gradients,
    own_nbytes,
    read_overflow,
    round_back,
    set_formats,
    stand_ins_nbytes,
    state_nbytes,
    unscale,
)
from trainledger.ledger.optimizers.update import clip, update
from trainledger.ledger.parallel.micro_batches import Work, run_micro_batches
from trainledger.ledger.parallel.rank_plan import RankPlan, rank_plan
from trainledger.ledger.parallel.reduction import bucket_nbytes, gather_updated, sum_norms, sum_tied_embedding
from trainledger.ledger.parallel.schedule import in_flight
from trainledger.spec.dtypes import nbytes_in
from trainledger.spec.layout import is_int
from trainledger.spec.precision import Precision
from trainledger.spec.recipe import Recipe
from trainledger.spec.run import Run
from trainledger.spec.units import ceil_div


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
    compiled = recipe.compile or recipe.of_xla
    if len(ranks) > 1 and (compiled or _copies_gradients(precision)):  # their updates change what was before
        return tuple(follow(each, backend=backend) for each in ranks)
    hooks, note = _hooks(rank)
    tape = Tape(precision, backend, hooks)
    tape.sends_gradients = rank.offload(backend) is not None and rank.sends_gradients and not rank.sharded
    sizes = sizes_of(rank.run, backend)
    works = tuple(Work(tape, rank, sizes, chunk) for chunk in rank.chunks)
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


def _hooks(rank: RankPlan) -> tuple[tuple[Hook, ...], str]:
    """What a compiler, or Megatron-LM's fused kernels, change of the step, and a sentence on what is not covered."""
    recipe = rank.run.recipe
    if not recipe.of_xla:
        return hooks_of(rank) if recipe.compile or recipe.of_megatron else ((), "")
    as_eager = uncovered(rank)
    return ((Kernels(),), as_eager) if as_eager else ((Kernels(), WholeStep(rank)), "")


def forwards(run: Run, *, backend: str) -> int:
    """The peak of a micro-batch's forward without a graph, in which log-probabilities are taken, on the first rank."""
    plan = rank_plan(run)
    precision = plan.run.recipe.precision
    tape, sizes = Tape(precision, backend), sizes_of(plan.run, backend)
    works = tuple(Work(tape, plan, sizes, chunk) for chunk in plan.chunks)
    set_formats(plan.owned, precision)
    with tape.without_graph():
        for work in works:
            work.forward()
            if work.sharded is not None:
                work.sharded.ends()
    tokens = plan.run.device_batch * plan.run.recipe.seq_len
    resident = resident_of(plan, works, plan.owned, tokens)
    return int(tape.ledger(resident=resident, parameters=0, tokens=tokens, micro_batches=1).peak().nbytes)


def _copies_gradients(precision: Precision) -> bool:
    """Whether an update begins with gradients in the master copy's format, and frees the original ones."""
    return bool(precision.master) and not precision.gradient_buffers


def _update(tape: Tape, rank: RankPlan, works: tuple[Work, ...], loss: Array | None) -> None:
    """The step after the last micro-batch: clip gradients and update parameters."""
    recipe, precision, leaves = rank.run.recipe, rank.run.recipe.precision, rank.owned
    for held_by in (leaves,) if rank.gathers else (work.leaves for work in works):
        sum_tied_embedding(tape, rank, held_by)
    held: list[Array] = []
    gradients: list[Array] = []
    offload = rank.offload(tape.backend)
    # DDP, ZeRO-1 and pipelines add gradients up over micro-batches on the device, and reduce them once: only then is
    # there something to send.
    if offload is not None and not rank.sends_gradients:
        with tape.during("optimizer"):
            whole = Array(leaves.trained().elements, precision.gradients, None)
            held.append(tape.moved("to_host", whole, GRADIENTS_ON_HOST))
    with tape.on_the_host() if offload is not None else nullcontext():
        if _copies_gradients(precision):
            apart = offload is not None or rank.sharded or any(work.buffered for work in works)
            gradients = main_gradients(tape, leaves, whole=not apart)
            for work in works:
                work.drop_gradients()
        array = unscale(tape, leaves) if precision.loss_scaling else None
        if recipe.grad_clip is not None:
            with tape.during("clip"):
                sum_norms(tape, rank, leaves)
                held += clip(tape, leaves, foreach=tape.backend != "cpu")
        with tape.during("optimizer"):
            if array is not None:
                read_overflow(tape, array)
            update(tape, leaves, recipe, rank.group if rank.gathers else None)
            if precision.master:
                round_back(tape, leaves)
                gradients.clear()
            if array is not None:
                adapt_scale(tape, array)
    if offload == "optimizer":
        with tape.during("optimizer"):
            updated = Array(leaves.trained().elements, precision.parameters, None)
            tape.emit("to_device", "transfer", changes=[updated])
    if rank.sharded and not rank.gathers:
        gather_updated(tape, rank, [work.leaves for work in works])
    if loss is not None and loss.memory is not None:  # the step has it to here
        tape.released(loss.memory.record)
    del held, array


def batch_nbytes(rank: RankPlan) -> Int:
    """Megatron-LM's tensors of a micro-batch: ids, labels, positions, the mask of the loss in fp32, that of attention.

    A byte for each query and key of a sequence (megatron/training/datasets, ``create_attention_mask``).
    """
    run = rank.run
    tokens = run.device_batch * run.rank_tokens
    # Ids, labels and positions of 8 bytes each, and 4 of the mask of the loss.
    return 28 * tokens + tokens * run.recipe.seq_len


def _given(recipe: Recipe, tokens: Int) -> Int:
    """Bytes of so many tokens and their targets, and of a sequence's loss under a precomputed reference; of single
    answers also those of mismatched ones, and a weight."""
    mismatched, known = recipe.objective.mismatched, recipe.objective.reference == "precomputed"
    return (1 + mismatched) * (
        16 * tokens + known * 4 * tokens // recipe.seq_len
    ) + mismatched * 4 * tokens // recipe.seq_len


def _buffers(rank: RankPlan, works: tuple[Work, ...]) -> Int:
    """The models' own, and of Megatron-LM without Transformer Engine one for the scores of attention, which stays.

    (core/transformer/dot_product_attention.py, ``get_global_memory_buffer``.)
    """
    run = rank.run
    nbytes = sum(buffers_nbytes(some.model) for some in (run, run.reference) if some is not None)
    attention = works[0].sizes.attention
    if run.recipe.framework != "megatron-local" or attention != "math":
        return nbytes
    scores = run.device_batch * run.model.attention.n_heads * run.rank_tokens * run.recipe.seq_len
    return nbytes + nbytes_in(scores, run.recipe.precision.compute)


def resident_of(rank: RankPlan, works: tuple[Work, ...], owned: ModelLeaves, tokens: Int) -> Amounts:
    """The memory of a rank before a step of so many tokens, by category."""
    recipe, precision = rank.run.recipe, rank.run.recipe.precision
    resident = [
        ("parameters", sum(work.parameters_nbytes for work in works)),
        ("frozen weights", sum(work.frozen_nbytes for work in works)),
        ("gradients", sum(work.buffers_nbytes for work in works)),
        ("optimizer state", state_nbytes(owned, recipe) + own_nbytes(owned, precision)),
        ("batch", batch_nbytes(rank) if recipe.of_megatron else _given(recipe, tokens)),
        ("communication", 0 if recipe.of_megatron else bucket_nbytes(rank, owned, precision.gradients)),
        ("buffers", _buffers(rank, works) + sum(work.copies_nbytes for work in works)),
        ("stand-ins of gradients", stand_ins_nbytes((work.leaves for work in works), precision.parameters)),
    ]
    offload = rank.offload(works[0].tape.backend)
    # The host's processor updates weights in its own memory: a master copy, where the precision has none.
    if offload == "optimizer" and not precision.master:
        resident[3] = (resident[3][0], resident[3][1] + nbytes_in(owned.trained().elements, precision.updated))
    there = {None: (), "optimizer": STATES_ON_HOST[3:], "parameters": STATES_ON_HOST}[offload]
    placed = ((f"{HOST} {name}" if f"{HOST} {name}" in there else name, nbytes) for name, nbytes in resident)
    return tuple((name, nbytes) for name, nbytes in placed if not is_zero(nbytes))


BUCKET = 500_000_000  # elements of DeepSpeed's reduce_bucket_size by default


# Memory that a program's allocator reserves and no live tensor has: blocks of a stream serve no other stream, and
# segments are never joined (c10/cuda/CUDACachingAllocator.cpp), so such blocks stay reserved even when nothing in them
# is live.


def reserved(rank: RankPlan, ledger: Ledger, *, backend: str) -> Amounts:
    """What the rank's framework reserves on an accelerator in addition to the ledger's peak, by its cause."""
    if backend == "cpu" or rank.layout.alone:
        return ()
    if rank.run.recipe.framework == "deepspeed":  # whose requests are ordered by size, so that they are one run's
        sizes = ledger.parameters, rank.layout.devices, rank.run.grad_accum, rank.run.device_batch
        return tuple(_deepspeed(rank, ledger)) if all(map(is_int, sizes)) and rank.layout.zero == 1 else ()
    if rank.run.recipe.framework == "torch" and rank.gathers and rank.layout.reshards:
        return tuple(_fsdp2(rank, ledger))
    return ()


def _fsdp2(rank: RankPlan, ledger: Ledger) -> Iterator[tuple[str, Int]]:
    """Buffers that FSDP2 allocates in separate streams (torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py)."""
    # The flat buffer of the first gather, of parameters outside the blocks, in the copy-in stream; the shards of
    # gradients in the stream of the reduce-scatter; and the logits in 16 bits, freed before backward, whose block is
    # too small for the fp32 gradient.
    run, precision = rank.run, rank.run.recipe.precision
    outside = sum(leaf.elements for chunk in rank.chunks for leaf in chunk.leaves.outside if leaf.decayed)
    gathered = nbytes_in(outside, precision.arriving)
    shards = 0 if run.recipe.offload else nbytes_in(ledger.parameters, precision.gradients)
    logits: Int = 0
    if run.recipe.loss.kind == "full" and precision.low and rank.chunks[-1].chunk.ends:
        logits = nbytes_in(run.device_batch * run.recipe.seq_len * run.model.head_rows, precision.compute)
    yield "FSDP2's streams", gathered + shards + logits


def _deepspeed(rank: RankPlan, ledger: Ledger) -> Iterator[tuple[str, int]]:
    """Memory of DeepSpeed's pipeline engine and ZeRO-1 optimizers of 2022 (deepspeed/runtime); not of ZeRO-2 and 3."""
    run, recipe, layout = rank.run, rank.run.recipe, rank.layout
    last, first = rank.chunks[-1].chunk.ends, rank.chunks[0].chunk.begins
    activation = nbytes_in(run.device_batch * recipe.seq_len * run.model.d_model, recipe.precision.compute)
    flying = int(in_flight(layout, rank.stage, run.grad_accum))
    # runtime/pipe/engine.py keeps pipe_buffers["outputs"] until their backward, and runs forward on clones of inputs.
    yield "DeepSpeed's pipeline buffers", int(flying * activation * ((not last) + (not first)))
    parameters = int(ledger.parameters)
    embedding = run.model.padded_vocab * run.model.d_model
    matrix = run.model.feed_forward.d_ff * run.model.d_model
    if recipe.precision.gradient_buffers:
        # runtime/bf16_optimizer.py adds 16-bit gradients to fp32 ones after a stage's backward, and lets them go before
        # the next one (clear_lp_grads=False); update_hp_grads casts one parameter at a time.
        yield "DeepSpeed's gradients", 2 * parameters + 4 * embedding
        return
    own = ceil_div(parameters, layout.shard_ranks)
    states = sum(int(nbytes) for name, nbytes in ledger.resident if name in ("parameters", "optimizer state"))
    # zero/stage_1_and_2.py makes its own fp32 gradients once before any activation (initialize_optimizer_states).
    beside = max(0, states + 2 * parameters + 4 * own - int(peak_nbytes(ledger)))
    largest = max(min(embedding, own), min(matrix, own))
    counted = largest if first else min(matrix, own)
    requests = [
        (2 * min(BUCKET, parameters),),  # reduce_bucket_size, flattened: contiguous_gradients is off in stage 1
        (4 * largest,),  # has_overflow: x.float().sum() of each gradient
        (8 * counted,),  # get_grad_norm_direct: g.data.double().norm(2), but for the last stage's tied embedding
        (2 * own, 4 * own),  # step: the gradients of its own piece, flat, and that in fp32
    ]
    yield "DeepSpeed's gradients", beside + new_segments([4 * own], requests)


def new_segments(free: list[int], requests: list[tuple[int, ...]]) -> int:
    """Bytes that the caching allocator takes from the driver for large requests, one tuple alive at a time.

    It gives the smallest free block that is large enough, split, and else takes a new segment; segments are never
    joined. ``free`` are the large blocks at the beginning.

    >>> new_segments([10], [(4,), (12,), (6, 10)])
    12
    """
    segments, taken = list(free), 0
    for together in requests:
        rest = list(segments)  # all of a segment is free again when nothing of it is in use
        for nbytes in together:
            able = [index for index, each in enumerate(rest) if each >= nbytes]
            if able:
                rest[min(able, key=rest.__getitem__)] -= nbytes
            else:
                segments.append(nbytes)
                rest.append(0)
                taken += nbytes
    return taken

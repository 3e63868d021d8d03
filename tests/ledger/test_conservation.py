"""Nothing is lost between ranks: what all of them have together is what one device would have, and what is duplicated.

What a layout duplicates is worked out here from the shapes of the parameters alone.
"""

from dataclasses import replace
from math import ceil, prod
from typing import Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from models import spec_of
from trainledger.ledger.ledger import Ledger
from trainledger.ledger.memory.timeline import timeline
from trainledger.ledger.model import parameters as shapes
from trainledger.ledger.ranks import accounts
from trainledger.ledger.step import account
from trainledger.spec.cluster import Cluster
from trainledger.spec.layers import kind_of
from trainledger.spec.layout import SCHEDULES, Layout
from trainledger.spec.model import ModelSpec
from trainledger.spec.parts import from_fields, with_fields
from trainledger.spec.precision import BF16
from trainledger.spec.recipe import Recipe
from trainledger.spec.rules.run import run_problems
from trainledger.spec.run import Run

pytestmark = pytest.mark.sweep


def pick(*values: Any) -> st.SearchStrategy[Any]:
    return st.sampled_from(values)


@st.composite
def spread_runs(draw: st.DrawFn) -> Run:
    """A model over any layout that its rules allow."""
    tensor, context = draw(pick(1, 1, 2, 4)), draw(pick(1, 1, 2))
    pipeline, shard = draw(pick(1, 1, 2, 3)), draw(pick(1, 2, 3, 4))
    schedule = draw(pick(*SCHEDULES)) if pipeline > 1 else "1f1b"
    virtual = draw(pick(1, 2)) if schedule == "interleaved" else 1
    experts = draw(pick(None, None, 4))
    zero = draw(pick(1, 2, 3))
    whole = shard * context
    expert = draw(pick(*(each for each in (1, 2, 4) if whole % each == 0))) if experts else 1
    kv_heads = draw(pick(4, 2, 1))
    chunks = pipeline * virtual
    layers = chunks * draw(pick(1, 2))
    stage_layers = None
    if chunks > 1 and draw(st.booleans()):
        layers += 1
        stage_layers = tuple(layers // chunks + (each < layers % chunks) for each in range(chunks))
    llama = draw(st.booleans())
    mixture = {
        "feed_forward": "experts",
        "feed_forward.n_experts": experts,
        "feed_forward.per_token": 2,
        "feed_forward.expert_d_ff": 8,
        "feed_forward.n_shared": draw(pick(0, 1)),
        "feed_forward.n_dense_layers": draw(pick(0, 1)),
    }
    model = from_fields(
        ModelSpec,
        {
            "vocab_size": draw(pick(32, 64)),
            "d_model": draw(pick(16, 20, 33)),
            "n_layers": layers,
            "attention.n_heads": 4,
            "attention.n_kv_heads": kv_heads,
            "attention.head_dim": draw(pick(4, 6)),
            "feed_forward.d_ff": draw(pick(8, 36)),
            "max_seq_len": 16,
            "tie_embeddings": draw(st.booleans()),
            "norm": "rmsnorm" if llama else "layernorm",
            "norm.bias": not llama,
            "feed_forward.gated": llama,
            "feed_forward.bias": not llama,
            "feed_forward.activation": "silu" if llama else "gelu",
            "positions": "rope" if llama else "learned",
            "attention.bias": draw(st.booleans()),
            "attention.qk_norm": draw(pick(None, "head")),
            **(mixture if experts else {}),
        },
    )
    sequence_parallel = tensor > 1 and draw(st.booleans())
    layout = Layout(
        split_sends=tensor > 1 and pipeline > 1 and not sequence_parallel and draw(st.booleans()),
        replicate=draw(pick(1, 2)), shard=shard, zero=zero, tensor=tensor, pipeline=pipeline, schedule=schedule,
        virtual_stages=virtual, stage_layers=stage_layers, context=context, expert=expert, prefetch=draw(pick(0, 1, 2)),
        reshard_after_forward=draw(pick(None, True, False)) if zero == 3 and schedule != "interleaved" else None,
        sequence_parallel=sequence_parallel, context_kind=draw(pick("ring", "all-to-all")),
        sequence_gather=draw(pick("kept", "again")) if sequence_parallel else "kept",
    )  # fmt: skip
    batch = draw(pick(1, 2))
    recipe = from_fields(Recipe, {
        "seq_len": 16, "micro_batch": batch, "global_batch": batch * layout.data_ranks * pipeline * draw(pick(1, 2)),
        "steps": 1, "precision": draw(pick("fp32", "bf16-mixed")),
        "activation_checkpointing": draw(pick("none", "full")), "optimizer": draw(pick("adamw", "sgd")),
    })  # fmt: skip
    return Run(model=model, recipe=recipe, layout=layout, cluster=Cluster(count=layout.devices))


@settings(max_examples=60, phases=(Phase.explicit, Phase.reuse, Phase.generate))
@given(spread_runs())
@pytest.mark.long
def test_nothing_is_lost_between_ranks(run: Run) -> None:
    problems = list(run_problems(run))
    if problems:  # heads that cannot go over both tensor and context ranks
        assert all(each.field.startswith("layout.context") for each in problems)
        return
    layout, found = run.layout, accounts(run)
    assert sum(each.count for each in found) == layout.devices
    alone = account(replace(run, layout=Layout(), cluster=Cluster()))
    assert summed(found, lambda ledger: ledger.parameters) == parameters_of_all(run)
    assert summed(found, lambda ledger: ledger.model_flops) == alone.model_flops + duplicated_flops(run)
    assert summed(found, lambda ledger: ledger.tokens) == alone.tokens * layout.tensor * layout.pipeline
    assert summed(found, lambda ledger: dict(ledger.resident)["parameters"]) == 4 * held_by_all(run)
    assert summed(found, lambda ledger: dict(ledger.resident).get("optimizer state", 0)) == states_of_all(run)
    assert summed(found, gradient_nbytes) == 4 * gradients_of_all(run)


@st.composite
def saving_runs(draw: st.DrawFn) -> Run:
    """The same in more number formats and with more ways to save memory; kernels that know no fp32 have none."""
    run = draw(spread_runs())
    attention = draw(pick("sdpa", "flash"))
    formats = ("bf16", "fp16", "bf16-mixed", "fp16-mixed", "bf16-sharded")
    precision = draw(pick(*(formats if attention == "flash" else ("fp32", *formats))))
    loss = draw(pick("full", "chunked", "compiled")) if run.layout.tensor == 1 else "full"
    recipe = with_fields(run.recipe, {
        "precision": precision,
        "precision.master_weights": draw(st.booleans()) if precision == "bf16" else None,
        "attention": attention, "dropout": draw(pick(0.0, 0.1)),
        "activation_checkpointing": draw(pick("none", "full", "attention", "selective", "offload", "segments")),
        "loss": loss, "loss.chunks": 2 if loss == "chunked" else None,
        "compile": draw(st.booleans()),
    })  # fmt: skip
    return replace(run, recipe=recipe)


@settings(max_examples=75, phases=(Phase.explicit, Phase.reuse, Phase.generate))
@given(saving_runs(), pick("cpu", "cuda"))
def test_after_a_step_only_gradients_are_left(run: Run, backend: str) -> None:
    """What is allocated is freed as often, category by category, and nothing is freed before it is there."""
    if list(run_problems(run)) or (backend, run.recipe.attention) == ("cpu", "flash"):
        return
    for each in accounts(run, backend=backend):
        left: dict[str, int] = {}
        for entry in each.ledger:
            for sign, amounts in ((1, entry.allocated), (-1, entry.freed)):
                for category, nbytes in amounts:
                    left[category] = left.get(category, 0) + sign * nbytes * entry.times
        assert left.pop("gradients", 0) >= 0
        assert not any(left.values()), (each.title, left)
        for moment in timeline(each.ledger):
            assert min(moment.live.values()) >= 0, (moment.entry.name, moment.live)


def test_pieces_of_gradients_go_once_there_are_wide_ones() -> None:
    """One copy of every block's piece, also of those that a loop stands for."""
    spec = spec_of(V=32, D=16, L=12, H=4, F=32, T=16)
    recipe = Recipe(seq_len=16, global_batch=4, steps=1, precision=BF16(master_weights=True))
    for zero in (2, 3):
        run = Run(model=spec, recipe=recipe, layout=Layout(shard=4, zero=zero), cluster=Cluster(count=4))
        assert gradient_nbytes(account(run, backend="cuda")) == 0


@pytest.mark.parametrize("again", ["none", "full", "attention", "selective", "offload"])
@pytest.mark.parametrize("more", [{}, {"schedule": "interleaved", "virtual_stages": 2}])
def test_stages_keep_together_what_one_device_keeps(again: str, more: dict[str, Any]) -> None:
    spec = spec_of(V=32, D=16, L=8, H=4, F=8, T=16)
    recipe = from_fields(
        Recipe, {"seq_len": 16, "global_batch": 8, "micro_batch": 1, "steps": 1, "activation_checkpointing": again}
    )
    layout = Layout(pipeline=4, **more)
    found = accounts(Run(model=spec, recipe=recipe, layout=layout, cluster=Cluster(count=4)), backend="cuda")
    alone = account(Run(model=spec, recipe=recipe), backend="cuda")
    assert summed(found, lambda ledger: ledger.kept_nbytes) == alone.kept_nbytes


@pytest.mark.parametrize(("schedule", "in_forward"), [("1f1b", 8 - 3), ("gpipe", 1)])
def test_what_stands_outside_the_blocks_is_gathered_whenever_a_backward_has_let_it_go(schedule, in_forward):
    spec = spec_of(V=32, D=16, L=4, H=4, F=8, T=16)
    recipe = Recipe(seq_len=16, global_batch=16, micro_batch=1, steps=1)
    layout = Layout(pipeline=4, shard=2, reshard_after_forward=True, schedule=schedule)
    found = accounts(Run(model=spec, recipe=recipe, layout=layout, cluster=Cluster(count=8)), backend="cuda")
    first, last = found[0].ledger, found[-1].ledger
    # 8 micro-batches: a forward finds it there where another one ran just before, a backward where a forward did.
    assert root_gathers(first, "forward") == in_forward
    assert root_gathers(first, "backward") == 8 - in_forward
    assert root_gathers(last, "forward") + root_gathers(last, "backward") == 8


def root_gathers(ledger: Ledger, phase: str) -> int:
    found = (each for each in ledger if each.name == "all_gather" and each.path == "" and each.phase == phase)
    return sum(each.times for each in found)


def summed(found: Any, amount: Any) -> int:
    return sum(each.count * amount(each.ledger) for each in found)


def gradient_nbytes(ledger: Ledger) -> int:
    """Bytes of gradients that lie there when the optimizer comes."""
    live = dict(ledger.resident).get("gradients", 0)
    for each in ledger:
        live += each.times * dict(each.allocated).get("gradients", 0)
        live -= each.times * dict(each.freed).get("gradients", 0)
    return live


# What each tensor has, by its name and shape in the whole model


def tensors(run: Run) -> list[tuple[str, tuple[int, ...], int]]:
    """Every parameter of the model: its name, its shape, and on how many stages it lies."""
    spec = run.model
    tied = 2 if spec.tie_embeddings and run.layout.pipeline > 1 else 1
    named = [
        (name, shape, tied if name.startswith("embed_tokens") else 1) for name, shape in shapes.before_blocks(spec)
    ]
    for layer in range(spec.n_layers):
        named += [(name, shape, 1) for name, shape in shapes.block(spec, kind_of(spec, layer))]
    return named + [(name, shape, 1) for name, shape in shapes.after_blocks(spec)]


def is_expert(name: str) -> bool:
    return name.startswith("mlp.experts.")


def split(run: Run, name: str, shape: tuple[int, ...]) -> tuple[tuple[int, ...], int]:
    """A tensor rank's shape of a parameter, and how many expert ranks' worth of them there are."""
    spec, ranks = run.model, run.layout.tensor
    experts = run.layout.expert if is_expert(name) else 1
    size = list(shape)
    if is_expert(name):
        size[0] //= experts
        if name.endswith("down_proj"):
            size[2] //= ranks
        elif not name.endswith("down_proj_bias"):
            size[1] //= ranks
        return tuple(size), experts
    part = name.split(".")[-2] if "." in name else name
    if part in ("q_proj", "gate_proj", "up_proj", "embed_tokens", "lm_head"):
        size[0] //= ranks
    elif part in ("k_proj", "v_proj"):
        size[0] //= min(ranks, spec.kv_heads)
    elif part in ("o_proj", "down_proj") and name.endswith("weight"):
        size[1] //= ranks
    return tuple(size), experts


def pieces(run: Run, name: str, shape: tuple[int, ...]) -> tuple[int, int]:
    """Elements of a piece (rows along the dim that FSDP2 cuts, or a part of all), and how many ranks have one."""
    ranks = run.layout.shard_ranks // (run.layout.expert if is_expert(name) else 1)
    if run.layout.zero != 3:
        return ceil(prod(shape) / ranks), ranks
    rows = shape[1] if is_expert(name) and shape[0] % ranks else shape[0]
    return ceil(rows / ranks) * (prod(shape) // rows), ranks


def parameters_of_all(run: Run) -> int:
    """Elements of all ranks: pieces of one whole with zero = 3, else a whole on every rank."""
    layout, total = run.layout, 0
    for name, shape, stages in tensors(run):
        own, experts = split(run, name, shape)
        holders = experts if layout.zero == 3 else layout.shard_ranks
        total += prod(own) * holders * stages
    return total * layout.tensor * layout.replicate


def padded_of_all(run: Run) -> int:
    """Elements of all ranks' pieces, each as large as the largest."""
    total = 0
    for name, shape, stages in tensors(run):
        own, experts = split(run, name, shape)
        piece, ranks = pieces(run, name, own)
        total += piece * ranks * stages * experts
    return total * run.layout.tensor * run.layout.replicate


def held_by_all(run: Run) -> int:
    """Elements of parameters as they are held: pieces as large as the largest, or on every rank all pieces."""
    layout, total = run.layout, 0
    if layout.shard_ranks == 1:
        return parameters_of_all(run)
    if layout.zero == 3:
        return padded_of_all(run)
    for name, shape, stages in tensors(run):
        piece, ranks = pieces(run, name, split(run, name, shape)[0])
        total += piece * ranks * stages * layout.shard_ranks
    return total * layout.tensor * layout.replicate


def gradients_of_all(run: Run) -> int:
    """Gradients: with zero = 2 and 3 as padded pieces; whole buffers stay beside them if interleaved.

    Experts that no other rank has are not cut with zero = 3: their whole gradients are all that there is of them.
    """
    layout = run.layout
    if layout.zero == 1 or layout.shard_ranks == 1:
        return parameters_of_all(replace(run, layout=replace(layout, zero=1)))
    if layout.virtual_stages == 1:
        return padded_of_all(run)
    cut = [
        prod(split(run, name, shape)[0]) * stages
        for name, shape, stages in tensors(run)
        if not (is_expert(name) and layout.zero == 3 and layout.expert == layout.shard_ranks)
    ]
    return padded_of_all(run) + sum(cut) * layout.shard_ranks * layout.tensor * layout.replicate


def states_of_all(run: Run) -> int:
    """AdamW: two moments, and a counter for each tensor that a rank has."""
    if run.recipe.optimizer.kind == "sgd":
        return 0
    layout = run.layout
    count = sum(stages for _, _, stages in tensors(run))
    whole = layout.zero == 3 or layout.shard_ranks == 1
    moments = parameters_of_all(run) if whole else padded_of_all(run)
    return 8 * moments + 4 * count * layout.devices // layout.pipeline


def duplicated_flops(run: Run) -> int:
    """Matmuls that several tensor ranks do alike: shared key-value heads, and routers."""
    spec, ranks = run.model, run.layout.tensor
    tokens = run.recipe.global_batch * run.recipe.seq_len
    total = 0
    for layer in range(spec.n_layers):
        for name, shape in shapes.block(spec, kind_of(spec, layer)):
            if name.endswith(("k_proj.weight", "v_proj.weight")) and ranks > spec.kv_heads:
                total += (ranks // spec.kv_heads - 1) * 6 * tokens * prod(shape)
            elif name.endswith("router.weight"):
                total += (ranks - 1) * 6 * tokens * prod(shape)
    return total


def test_a_lost_layer_would_be_seen() -> None:
    layout = Layout(pipeline=2, stage_layers=(1, 1))
    spec = spec_of(V=32, D=16, L=2, H=4, F=8, T=16)
    run = Run(model=spec, recipe=Recipe(seq_len=16, global_batch=2, micro_batch=1, steps=1), layout=layout)
    found = accounts(run)
    assert summed(found, lambda ledger: ledger.parameters) == parameters_of_all(run)
    assert summed(found[:1], lambda ledger: ledger.parameters) != parameters_of_all(run)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_stage_is_distinguished(schedule: str) -> None:
    spec = spec_of(V=32, D=16, L=8, H=4, F=8, T=16)
    layout = Layout(pipeline=4, schedule=schedule, virtual_stages=2 if schedule == "interleaved" else 1)
    recipe = Recipe(seq_len=16, global_batch=8, micro_batch=1, steps=1)
    found = accounts(Run(model=spec, recipe=recipe, layout=layout, cluster=Cluster(count=4)))
    assert [each.title for each in found] == ["first stage", "stage 2", "stage 3", "last stage"]
    flights = {"gpipe": [8, 8, 8, 8], "1f1b": [4, 3, 2, 1], "zero-bubble": [4, 4, 4, 4], "interleaved": [11, 9, 7, 5]}
    assert [each.in_flight for each in found] == flights[schedule]
    peaks = [each.ledger.peak().by_category["activations"] for each in found[1:3]]
    assert peaks[0] == peaks[1] if schedule in ("gpipe", "zero-bubble") else peaks[0] > peaks[1]


def test_ten_million_ranks_with_uneven_pieces_are_distinguished() -> None:
    spec = spec_of(V=33, D=16, L=2, H=4, F=24, T=16)
    recipe = Recipe(seq_len=16, global_batch=10**7, micro_batch=1, steps=1)
    run = Run(model=spec, recipe=recipe, layout=Layout(shard=10**7), cluster=Cluster(count=10**7))
    found = accounts(run)
    assert sum(each.count for each in found) == 10**7
    assert summed(found, lambda ledger: ledger.parameters) == account(replace(run, layout=Layout())).parameters
    assert [each.count for each in found] == [16, 24 - 16, 33 - 24, 10**7 - 33]  # a row of each dim 0 to a rank

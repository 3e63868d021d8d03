"""Formulas against numbers: what a line says in letters, in figures and in sum is the same, and is the ledger's."""

from __future__ import annotations

import re
from dataclasses import replace
from fractions import Fraction
from math import ceil, floor, prod
from typing import Any

import pytest

from models import sizes as model_fields
from trainledger.answers.load import load
from trainledger.forecast.explain import account as explain
from trainledger.forecast.explain.envelope import envelope
from trainledger.forecast.explain.symbols import symbolic
from trainledger.forecast.predict.forecast import OF_CAUSES
from trainledger.forecast.predict.step import CAUSES, HOST_UPDATE, step_time
from trainledger.ledger.memory.timeline import timeline
from trainledger.ledger.model.parameters import parameters
from trainledger.ledger.parallel.schedule import in_flight
from trainledger.ledger.ranks import account_of_stage
from trainledger.ledger.step import account
from trainledger.spec.problem import InvalidInput
from trainledger.spec.run import Run

pytestmark = pytest.mark.agreement

SMALL = model_fields(V=301, D=48, L=3, H=6, F=100, T=64)
RUNS: dict[str, dict[str, Any]] = {
    "llama": {"model": {**SMALL, "attention.n_kv_heads": 2}},
    "one of each": {
        "model": {**SMALL, "n_layers": 1, "attention.n_heads": 1, "attention.head_dim": 48},
        "recipe": {"global_batch": 1},
    },
    "gpt2, written out": {
        "model": {
            **SMALL,
            "norm": "layernorm",
            "norm.bias": True,
            "feed_forward.gated": False,
            "positions": "learned",
            "feed_forward.activation": "gelu",
            "attention.bias": True,
            "feed_forward.bias": True,
            "tie_embeddings": True,
        },
        "recipe": {"attention": "math", "dropout": 0.1},
    },
    "checkpointed, accumulated": {
        "model": {**SMALL, "attention.n_kv_heads": 3},
        "recipe": {"precision": "bf16-mixed", "activation_checkpointing": "full", "micro_batch": 2},
    },
    "sharded, tensor and sequence": {
        "model": {**SMALL, "attention.n_kv_heads": 2, "feed_forward.d_ff": 96, "vocab_size": 304},
        "recipe": {"precision": "bf16-sharded", "global_batch": 8, "micro_batch": 2},
        "layout": {"shard": 2, "tensor": 2, "sequence_parallel": True},
    },
    "shards that divide, accumulated": {
        "model": {**SMALL, "attention.n_kv_heads": 3, "feed_forward.d_ff": 96, "vocab_size": 304},
        "recipe": {"precision": "bf16-sharded", "global_batch": 24, "micro_batch": 2},
        "layout": {"shard": 4},
    },
    "shards that do not divide, copied": {
        "model": SMALL,
        "recipe": {"precision": "bf16-sharded", "global_batch": 20},
        "layout": {"replicate": 2, "shard": 5},
    },
    "two layers, sharded once": {
        "model": {**SMALL, "n_layers": 2},
        "recipe": {"global_batch": 12, "micro_batch": 2},
        "layout": {"shard": 3, "zero": 2},
    },
    "an interleaved pipeline of shards": {
        "model": {**SMALL, "n_layers": 8},
        "recipe": {"precision": "bf16-sharded", "global_batch": 24, "micro_batch": 2},
        "layout": {"shard": 3, "pipeline": 2, "schedule": "interleaved", "virtual_stages": 2},
    },
    "a pipeline": {
        "model": {**SMALL, "n_layers": 4},
        "recipe": {"global_batch": 6, "micro_batch": 2},
        "layout": {"pipeline": 2},
    },
    "experts": {
        "model": {
            **SMALL,
            "feed_forward": "experts",
            "feed_forward.n_experts": 4,
            "feed_forward.expert_d_ff": 32,
            "feed_forward.n_dense_layers": 1,
            "feed_forward.n_shared": 1,
        }
    },
    "fewer layers than their pattern": {"model": {**SMALL, "n_layers": 2, "positions.skip_every": 3}},
    "local and global layers": {
        "model": {**SMALL, "attention.window": 16, "attention.global_every": 3},
        "recipe": {"attention": "math"},
    },
}


def run_of(name: str) -> Run:
    table = RUNS[name]
    recipe = {"seq_len": 32, "global_batch": 4, "steps": 1, **table.get("recipe", {})}
    layout = table.get("layout", {})
    return load({"model": table["model"], "recipe": recipe, "layout": layout, "cluster": {"count": _devices(layout)}})


def _devices(layout: dict[str, Any]) -> int:
    axes = ("replicate", "shard", "context", "tensor", "pipeline")
    return prod(layout.get(axis, 1) for axis in axes)


def evaluated(numbers: str) -> Fraction:
    """What a line's figures come to, worked out from the text a person reads."""
    whole = re.sub(r"(?<=\d),(?=\d)", "", numbers).replace(" x ", "*").replace("^", "**")
    known = {"__builtins__": {}, "floor": floor, "ceil": ceil, "Min": min, "F": Fraction}
    return Fraction(eval(re.sub(r"\d+", r"F(\g<0>)", whole), known))


def with_sizes(formula: str, sizes: dict[str, int]) -> Fraction:
    """What a line's letters come to, by a way of its own: a product is two factors with nothing between them."""
    written = re.sub(r"(?<=[\w)]) (?=[\w(])", "*", formula.replace("^", "**"))
    written = re.sub(r"(?<=\d),(?=\d)", "", written)
    known = {name: Fraction(size) for name, size in sizes.items()}
    return Fraction(eval(written, {"__builtins__": {}, "floor": floor, "ceil": ceil, **known}))


@pytest.mark.parametrize("name", RUNS)
def test_the_formulas_give_the_numbers_of_the_run(name: str) -> None:
    run = run_of(name)
    found, exact = symbolic(run), account(run)
    assert len(found.ledger) == len(exact)
    for mine, theirs in zip(found.ledger, exact, strict=True):
        assert mine.name == theirs.name
        for amount in ("flops", "model_flops", "read", "written", "kept", "times"):
            assert found.number(getattr(mine, amount)) == getattr(theirs, amount), (mine.path, mine.name, amount)
    assert max(found.number(each.nbytes) for each in timeline(found.ledger)) == exact.peak().nbytes


@pytest.mark.parametrize("name", RUNS)
@pytest.mark.parametrize("what", ["memory", "flops", "parameters"])
def test_every_line_says_the_same_in_figures_as_in_sum(name: str, what: str) -> None:
    for part in getattr(explain, what)(symbolic(run_of(name))):
        assert part.lines
        assert sum(line.value for line in part.lines) == part.total
        for line in part.lines:
            assert evaluated(line.numbers) == line.value, line
            assert with_sizes(line.formula, _sizes(run_of(name))) == line.value, line
            assert not re.search(r"Min|Max|floor\(-", line.formula)
            assert line.source
            assert line.basis in ("exact", "assumed")


def _sizes(run: Run) -> dict[str, int]:
    spec = run.model
    return {
        "B": run.device_batch,
        "A": run.grad_accum,
        "T": run.recipe.seq_len,
        "S": spec.max_seq_len,
        "V": spec.padded_vocab,
        "L": spec.n_layers,
        "D": spec.d_model,
        "F": spec.feed_forward.d_ff,
        "H": spec.attention.n_heads,
        "G": spec.kv_heads,
        "Q": spec.attention.n_heads // spec.kv_heads,
        "K": spec.head_size,
        "M": spec.experts.width if spec.experts else spec.feed_forward.d_ff,
        "E": spec.experts.n_experts if spec.experts else 0,
    }


def test_a_line_of_shards_is_a_few_terms() -> None:
    resident, kept, _ = explain.memory(symbolic(run_of("shards that divide, accumulated")))
    lines = {line.what: line.formula for part in (resident, kept) for line in part.lines}
    assert lines["layers.*.mlp silu"] == "2 B F L T"
    # In 4 pieces of fp32: q and o, k and v, three matrices of the MLP, two norms a block; table and head; a norm.
    terms = "2 D G K L + 2 D H K L + 3 D F L + 2 D L + 2 D V + D"
    assert lines["parameters"] == terms
    uneven, _, _ = explain.memory(symbolic(run_of("shards that do not divide, copied")))
    (parameters_line,) = [line.formula for line in uneven.lines if line.what == "parameters"]
    assert "ceil(D/5)" in parameters_line
    assert parameters_line.count(" + ") < 10


@pytest.mark.parametrize(
    ("name", "stage", "alive"),
    [
        ("checkpointed, accumulated", 0, "1 of 2 micro-batches"),
        ("shards that divide, accumulated", 0, "1 of 3 micro-batches"),
        ("two layers, sharded once", 0, "1 of 2 micro-batches"),
        ("a pipeline", 0, "2 of 3 micro-batches"), ("a pipeline", 1, "1 of 3 micro-batches"),
    ],
)  # fmt: skip
def test_what_is_kept_is_that_of_the_micro_batches_alive_at_once(name: str, stage: int, alive: str) -> None:
    """A step of as many micro-batches as are alive at once keeps as much, and no more is alive in a longer one."""
    run = run_of(name)
    kept = explain.memory(symbolic(run, stage=stage))[1]
    assert kept.title == f"kept by the forward, alive at once: {alive}"
    batch = run.device_batch * run.layout.data_ranks * int(alive.split()[0])
    short = replace(run, recipe=replace(run.recipe, global_batch=batch))
    assert kept.total == account_of_stage(short, stage).total("kept")


def test_the_forwards_of_chunks_alive_at_once_are_those_in_flight() -> None:
    name = "an interleaved pipeline of shards"
    for stage, alive in ((0, 5), (1, 3)):
        assert in_flight(run_of(name).layout, stage, 4) == alive
        kept = explain.memory(symbolic(run_of(name), stage=stage))[1]
        assert kept.title.endswith(f": {alive} of 8 forwards of a chunk of layers")
        silu = next(line for line in kept.lines if line.what == "layers.*.mlp silu")
        assert silu.formula == f"{alive * 2 * 2} B F T"  # of 2 layers of a chunk, in two bytes each


@pytest.mark.parametrize("name", RUNS)
def test_the_parts_are_the_ledgers_totals(name: str) -> None:
    run = run_of(name)
    found, exact = symbolic(run), account(run)
    resident, kept, peak = explain.memory(found)
    assert resident.total == sum(nbytes for _, nbytes in exact.resident)
    assert kept.total == exact.total("kept") or run.grad_accum > 1
    assert peak.total == exact.peak().nbytes
    products, rest = explain.flops(found)
    assert products.total == exact.matmul_flops
    assert products.total + rest.total == exact.flops
    (named,) = explain.parameters(found)
    assert named.total == parameters(run.model).total
    assert named.total == exact.parameters or not run.layout.alone


def test_the_time_is_the_roofline_line_by_line() -> None:
    run = load({"model": {"preset": "gpt2"}, "recipe": {"seq_len": 64, "global_batch": 2, "steps": 1}})
    from trainledger import catalog

    step = step_time(account(run, backend="cuda"), catalog.device("a100-sxm-80gb"))
    # fp32 products have a peak on that sheet; every second of the step stands in some line.
    causes, *phases = explain.time(step)
    assert causes.total == pytest.approx(step.seconds)
    defined = {cause for cause, row in OF_CAUSES.items() if "means" in row}
    assert {each.what for each in causes.lines} <= defined == {*CAUSES, HOST_UPDATE}
    assert sum(each.total for each in phases) == pytest.approx(step.seconds)
    assert {each.title for each in phases} == set(step.by_phase)


@pytest.mark.parametrize("name", ["llama", "gpt2, written out", "checkpointed, accumulated"])
@pytest.mark.parametrize("memory_nbytes", [10**6, 10**7, 10**8])
def test_the_largest_batch_is_the_one_that_counting_finds(name: str, memory_nbytes: int) -> None:
    run = run_of(name)
    found = envelope(run, "B", memory_nbytes=memory_nbytes)
    assert found.largest is not None

    def peak(batch: int) -> int:
        overrides = {"recipe.micro_batch": batch, "recipe.global_batch": batch * run.grad_accum}
        table = {"model": RUNS[name]["model"], "recipe": {"seq_len": 32, "steps": 1, **RUNS[name].get("recipe", {})}}
        return account(load({**table, "recipe": {**table["recipe"], "global_batch": 4}}, overrides)).peak().nbytes

    if found.largest >= 2:
        assert found.nbytes_at_largest == peak(found.largest) <= memory_nbytes
    assert found.largest == 0 or peak(found.largest + 1) > memory_nbytes


def test_the_pieces_of_a_peak_follow_one_another_and_each_is_the_peak() -> None:
    run = run_of("llama")
    found = envelope(run, "T")
    assert [each.first for each in found.pieces] == [1, *((each.last or 0) + 1 for each in found.pieces[:-1])]
    assert found.pieces[-1].last is None
    for piece in found.pieces:
        for tokens in {max(piece.first, 2), piece.last or 2 * piece.first + 7}:
            if tokens > 64 or tokens < 2:
                continue
            exact = account(load({"model": RUNS["llama"]["model"], "recipe": {"seq_len": tokens, "global_batch": 4,
                                                                             "steps": 1}})).peak().nbytes  # fmt: skip
            said = eval(piece.formula.replace("^", "**").replace(",", "").replace(" T", "*T"), {"T": tokens})
            assert said == exact


def test_an_envelope_of_shards_says_what_is_rounded_up() -> None:
    run = run_of("shards that do not divide, copied")
    found = envelope(run, "D")
    assert "ceil(D/5)" in found.categories["parameters"]
    assert not [each for each in found.categories.values() if "floor(-" in each or "." in each]
    for category, nbytes in account(run).resident:
        if category in found.categories:
            assert with_sizes(found.categories[category], {"D": 48}) == nbytes, category


def test_gpt2_xl_in_80_gb() -> None:
    """The lecture's question: GPT-2 XL in fp32 with AdamW, 1,024 tokens, scores written out; how large a batch?"""
    recipe = {"seq_len": 1024, "global_batch": 1, "steps": 1, "precision": "fp32", "attention": "math"}
    run = load({"model": {"preset": "gpt2-xl"}, "recipe": recipe})
    found = envelope(run, "B", memory_nbytes=80 * 10**9)
    P = 1_557_611_200
    assert found.categories["parameters"] == found.categories["gradients"] == f"{4 * P:,}"
    assert found.categories["optimizer state"] == f"{8 * P + 4 * 772:,}"  # and a step counter for each tensor
    assert "B" in found.categories["activations"]
    # Every block keeps 8 tensors of the stream's width, 2 of the MLP's and one of T x T per head, in fp32.
    blocks = 48 * 4 * 1024 * (8 * 1600 + 2 * 6400 + 25 * 1024)
    assert int(found.categories["activations"].split(" ")[0].replace(",", "")) == pytest.approx(blocks, rel=0.005)
    assert found.largest == 5
    assert account(load({"model": {"preset": "gpt2-xl"}, "recipe": {**recipe, "global_batch": 5}})).peak().nbytes == (
        found.nbytes_at_largest
    )


@pytest.mark.parametrize("stage", [0, 1])
def test_each_stage_of_a_pipeline_is_explained(stage: int) -> None:
    run = run_of("a pipeline")
    exact = account_of_stage(run, stage)
    peak = explain.memory(symbolic(run, stage=stage))[-1]
    assert peak.total == exact.peak().nbytes
    largest = envelope(run, "T", memory_nbytes=3 * 10**6, stage=stage).largest
    assert largest is not None
    recipe = {"steps": 1, "global_batch": 6, "micro_batch": 2}
    for tokens, fits in ((largest, True), (largest + 1, False)):
        table = {"model": {**SMALL, "n_layers": 4, "max_seq_len": 10**4}, "recipe": {**recipe, "seq_len": tokens},
                 "layout": {"pipeline": 2}, "cluster": {"count": 2}}  # fmt: skip
        # Positions of the rope are buffers: more of them than the run has.
        more = 2 * 4 * (10**4 - 64) * 4
        assert (account_of_stage(load(table), stage).peak().nbytes - more <= 3 * 10**6) == fits


def test_a_size_that_a_run_does_not_have_is_reported() -> None:
    with pytest.raises(InvalidInput) as caught:
        envelope(run_of("llama"), "X")
    assert "--symbolic" in str(caught.value)
    assert "must be one of B, A, T, L, D, F, V" in str(caught.value)
    with pytest.raises(InvalidInput) as caught:
        envelope(run_of("local and global layers"), "L")
    assert "decides which operations run" in str(caught.value)

"""What sequence-parallel ranks gather again: kept bytes as Korthikanti et al. 2022 have them, and what it costs."""

from collections import Counter
from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import Phase, assume, given, settings
from test_conservation import saving_runs

from models import GPT2, spec_of
from trainledger.ledger.ledger import Ledger
from trainledger.ledger.ranks import accounts
from trainledger.spec.cluster import Cluster
from trainledger.spec.layout import Layout
from trainledger.spec.model import ModelSpec
from trainledger.spec.parts import from_fields
from trainledger.spec.precision import BF16
from trainledger.spec.recipe import Recipe
from trainledger.spec.rules.run import run_problems
from trainledger.spec.run import Run

pytestmark = pytest.mark.agreement

# The symbols of arXiv 2205.05198: sequence, micro-batch, hidden size, heads, tensor ranks.
S, B, H, A, T = 2048, 1, 4096, 32, 8


def gpt(layers: int, gather: str, **recipe: Any) -> Run:
    """The paper's model (figure 2) in 16 bits with dropout."""
    model = spec_of(V=51200, D=H, L=layers, H=A, F=4 * H, T=S, **GPT2)
    fields: dict[str, Any] = {"dropout": 0.1, "attention_dropout": 0.1, "attention": "math", **recipe}
    found = from_fields(Recipe, {
        "seq_len": S, "global_batch": B, "micro_batch": B, "steps": 1, "precision": "bf16",
        "precision.master_weights": True, **fields,
    })  # fmt: skip
    layout = Layout(tensor=T, sequence_parallel=True, sequence_gather=gather)
    return Run(model=model, recipe=found, layout=layout, cluster=Cluster(count=T))


def of_a_layer(gather: str, **recipe: Any) -> Fraction:
    """Bytes kept of one layer on one rank, in units of sbh / t."""
    three, four = (accounts(gpt(n, gather, **recipe), backend="cuda")[0].ledger.kept_nbytes for n in (3, 4))
    return Fraction((four - three) * T, S * B * H)


# Means and deviations of both norms, 4 bytes each for a token, which the paper leaves out (section 4.1).
STATISTICS = Fraction(2 * 2 * 4, H)


def test_a_layer_keeps_what_the_paper_says() -> None:
    """Equations 2 and 4, table 2: sbh / t (34 + 5as / h) with sequence parallelism, 34 sbh / t with selective."""
    assert of_a_layer("again") - STATISTICS == 34 + Fraction(5 * A * S, H)
    assert of_a_layer("again", activation_checkpointing="attention") - STATISTICS == 34


def test_what_is_gathered_is_kept_twice_a_layer_where_it_is_not_gathered_again() -> None:
    """2sbh of each of the two inputs, where the paper has 2sbh / t."""
    for saving in ("none", "attention"):
        kept, again = (of_a_layer(each, activation_checkpointing=saving) for each in ("kept", "again"))
        assert kept - again == 2 * (2 * T - 2)


def test_without_dropout_there_are_no_masks() -> None:
    """A byte for each element: twice sbh / t behind the branches, and of scores as^2b with what they leave."""
    again = of_a_layer("again", activation_checkpointing="attention", dropout=0.0, attention_dropout=0.0)
    assert again - STATISTICS == 32
    plain = of_a_layer("again", dropout=0.0, attention_dropout=0.0)
    assert plain - STATISTICS == 32 + Fraction(2 * A * S, H)


def test_a_fused_kernel_keeps_a_number_for_each_row_beside() -> None:
    """Log-sums of the flash kernel, 4 bytes for each head and token, and its generator's state, three numbers."""
    plain = of_a_layer("again", attention="flash", attention_dropout=0.0) - STATISTICS
    assert plain == 34 + Fraction(4 * A, H) + Fraction(3 * 8 * T, S * B * H)


def sent(ledger: Ledger) -> Counter[tuple[Any, ...]]:
    found: Counter[tuple[Any, ...]] = Counter()
    for each in ledger:
        if each.kind == "collective":
            found[each.name, each.group, each.ranks, each.payload, each.path, each.phase] += each.times
    return found


@settings(max_examples=80,
    phases=(Phase.explicit, Phase.reuse, Phase.generate))  # fmt: skip
@given(saving_runs())
def test_no_more_is_kept_and_nothing_else_is_computed(run: Run) -> None:
    assume(run.layout.sequence_parallel)
    plain, other = (replace(run, layout=replace(run.layout, sequence_gather=each)) for each in ("kept", "again"))
    if list(run_problems(plain)):
        return
    assert not list(run_problems(other))
    for kept, again in zip(accounts(plain, backend="cuda"), accounts(other, backend="cuda"), strict=True):
        assert again.ledger.kept_nbytes <= kept.ledger.kept_nbytes
        assert again.ledger.matmul_flops == kept.ledger.matmul_flops
        assert again.ledger.model_flops == kept.ledger.model_flops
        if run.recipe.precision.kind.endswith("mixed"):
            continue  # then parts are made narrow before they are gathered, and all that is sent is half as long
        assert again.ledger.flops == kept.ledger.flops
        more, less = sent(again.ledger), sent(kept.ledger)
        assert not less - more
        assert dict(more - less) == added(kept.ledger)


def added(ledger: Ledger) -> dict[tuple[Any, ...], int]:
    """For each gather of a matmul's input in forward one in backward, the same."""
    found: Counter[tuple[Any, ...]] = Counter()
    for each in ledger:
        inputs = each.path.endswith(("self_attn", "mlp", "lm_head"))
        if (each.name, each.group, each.phase) == ("all_gather", "tensor", "forward") and inputs:
            found[each.name, each.group, each.ranks, each.payload, each.path, "backward"] += each.times
    return dict(found)


@pytest.mark.parametrize("saving", ["none", "full", "selective", "attention", "offload", "segments"])
def test_the_parts_are_there_for_the_first_matmul_of_an_input_and_for_no_other(saving: str) -> None:
    """A gather for queries, keys and values, one for the MLP and one for the head, each before a matmul of theirs."""
    run = gpt(2, "again", activation_checkpointing=saving)
    entries = [each for each in accounts(run, backend="cuda")[0].ledger if each.phase == "backward"]
    places = [at for at, each in enumerate(entries) if each.name == "all_gather" and each.overlap]
    branches = ["mlp", "self_attn"] * (len(places) // 2)
    assert [entries[at].path.rpartition(".")[2] for at in places] == ["lm_head", *branches]
    for at in places:
        assert entries[at + 1].kind in ("matmul", "transfer", "copy")
        assert entries[at + 1].path.startswith(entries[at].path)
        assert entries[at].payload == 2 * S * B * H
        assert entries[at].ranks == T


EXPERTS = {
    "feed_forward": "experts",
    "feed_forward.n_experts": 4,
    "feed_forward.per_token": 2,
    "feed_forward.expert_d_ff": 32,
    "feed_forward.n_shared": 1,
}


@pytest.mark.parametrize("experts", [{}, EXPERTS])
def test_latents_and_experts_read_what_is_gathered_once_for_a_branch(experts: dict[str, Any]) -> None:
    model = from_fields(
        ModelSpec,
        {
            "vocab_size": 96,
            "d_model": 32,
            "n_layers": 4,
            "attention.n_heads": 4,
            "feed_forward.d_ff": 64,
            "max_seq_len": 16,
            "attention": "latent",
            "attention.kv_rank": 16,
            "attention.q_rank": 24,
            "attention.nope_head_dim": 8,
            "attention.rope_head_dim": 8,
            "attention.v_head_dim": 8,
            **experts,
        },
    )
    recipe = Recipe(seq_len=16, global_batch=1, micro_batch=1, steps=1, precision=BF16())
    layout = Layout(tensor=2, sequence_parallel=True, sequence_gather="again")
    run = Run(model=model, recipe=recipe, layout=layout, cluster=Cluster(count=2))
    assert not list(run_problems(run))
    plain = replace(run, layout=replace(layout, sequence_gather="kept"))
    kept, again = (accounts(each, backend="cuda")[0].ledger for each in (plain, run))
    branches = 2 * model.n_layers + 1  # and the head
    assert (sent(again) - sent(kept)).total() == branches
    assert kept.kept_nbytes - again.kept_nbytes == branches * 2 * 16 * 32 // 2

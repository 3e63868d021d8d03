"""No flag that the reader knows is dropped in silence: it changes the run, is refused, or is said."""

import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from trainledger.spec.convert import megatron
from trainledger.spec.convert.megatron import Arguments, from_arguments
from trainledger.spec.convert.megatron.arguments import changes_nothing, tables
from trainledger.spec.problem import InvalidInput

BASE = {
    "num-layers": "8", "hidden-size": "64", "num-attention-heads": "4", "seq-length": "64", "micro-batch-size": "2",
    "max-position-embeddings": "64", "train-iters": "40", "bf16": "true", "lr": "0.1", "global-batch-size": "64",
}  # fmt: skip
# What others need beside them to mean anything.
AROUND: list[dict[str, Any]] = [
    {},
    {"num-experts": "8", "expert-model-parallel-size": "2", "moe-router-num-groups": "2", "mtp-num-layers": "1"},
    {"num-experts": "8", "moe-router-score-function": "sigmoid", "moe-shared-expert-intermediate-size": "64"},
    {"multi-latent-attention": "true", "transformer-impl": "local"},
    {"position-embedding-type": "rope", "use-rope-scaling": "true", "group-query-attention": "true"},
    {"pipeline-model-parallel-size": "2", "decoder-first-pipeline-num-layers": "3"},
    {"pipeline-model-parallel-size": "2", "num-virtual-stages-per-pipeline-rank": "2"},
    {"tensor-model-parallel-size": "2", "sequence-parallel": "true", "context-parallel-size": "2"},
    {"use-megatron-fsdp": "true", "fp8-format": "hybrid"},
    {"fp4-format": "e2m1", "first-last-layers-bf16": "true"},
    {"use-distributed-optimizer": "true", "exp-avg-dtype": "bf16", "tokenizer-type": "HuggingFaceTokenizer"},
    {"recompute-granularity": "full", "recompute-method": "uniform", "cross-entropy-loss-fusion": "true"},
    {"recompute-granularity": "selective", "swiglu": "true"},
    {"global-batch-size": "none", "lr-warmup-fraction": "0.5", "train-samples": "6400", "train-iters": "none"},
    {"global-batch-size": "none", "lr-warmup-samples": "64", "bf16": "none", "fp16": "true"},
    {"disable-bias-linear": "true", "use-flash-attn": "true", "vocab-size": "100", "transformer-impl": "local"},
]  # fmt: skip
VALUES: tuple[str | tuple[str, ...], ...] = (
    "true", "2", "1", "3", "16", "0.25", "100", "bf16", "local", "selective", "p2p", "a2a", "cosine", "sgd", "RMSNorm",
    "block", "te", "optim", "none", "Llama2Tokenizer", "mixtral", "sigmoid", "mxfp8", "nonsense", "t|t*7L", "fused",
    ("1", "64", "64"), "allgather",
)  # fmt: skip


@cache
def names_read() -> tuple[str, ...]:
    """The flags that the code of the reader names, and those of its tables."""
    texts = [path.read_text(encoding="utf-8") for path in sorted(Path(megatron.__file__).parent.glob("*.py"))]
    methods = "flag|text|count|number|given|words|needed|chosen"
    named = {found for text in texts for found in re.findall(rf'read\.(?:{methods})\(\s*"([a-z0-9-]+)"', text)}
    return tuple(sorted(named | {row[1] for name in ("latent", "recipe", "adamw") for row in tables()[name].values()}))


def said(values: dict[str, Any]) -> object:
    given = {name: value for name, value in values.items() if value != "none"}
    try:
        run = from_arguments(Arguments(given), devices=16)
    except InvalidInput as error:
        return [str(problem) for problem in error.problems]
    return run.table, run.notes, run.not_understood


@pytest.mark.parametrize("name", names_read())
def test_a_flag_that_is_read_means_something(name: str) -> None:
    for around in AROUND:
        without = {key: value for key, value in (BASE | around).items() if key != name}
        before = said(without)
        if any(said({**without, name: value}) != before for value in VALUES):
            return
    pytest.fail(f"--{name} is read, and nothing that it says changes a run, a note or a refusal")


@pytest.mark.parametrize("name", tables()["refused"])
def test_a_flag_that_is_refused_is_not_also_without_effect(name: str) -> None:
    assert f"--{name} = 'true'" in str(said({**BASE, name: "true"}))


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ({"fp8-format": "hybrid", "bf16": "none"}, "--fp8-format = 'hybrid': computes in 8 bits beside bf16 here"),
        ({"fp8-format": "e4m3", "bf16": "none", "fp16": "true"}, "--fp8-format"),
        ({"fp4-format": "e2m1", "bf16": "none"}, "--fp4-format = 'e2m1': computes in 4 bits beside bf16 here"),
        ({"num-experts": "8", "expert-model-parallel-size": "2"}, "'expert_send': 'all'"),
        ({"num-experts": "8", "expert-model-parallel-size": "2", "moe-token-dispatcher-type": "x"}, "must be one of"),
        ({"num-experts": "8", "moe-token-dispatcher-type": "foo"}, "must be one of allgather, alltoall, "),
        ({"exp-avg-dtype": "bf16"}, "--exp-avg-dtype = 'bf16': needs --use-precision-aware-optimizer"),
        ({"num-query-groups": "2"}, "--num-query-groups 2 without --group-query-attention: Megatron-LM ignores it"),
        ({"distribute-saved-activations": "true"}, "('distribute-saved-activations',)"),
    ],
)
def test_flags_that_change_numbers_are_said(flags: dict[str, Any], sentence: str) -> None:
    assert sentence in str(said(BASE | flags))


@pytest.mark.parametrize(
    ("pattern", "fields"),
    [
        ("([0]*1+[1]*3)", {"n_dense_layers": 1}),
        ("[0]+[1]*3", {"n_dense_layers": 1}),
        ("([0]*1+[1]*1)*2", {"every": 2}),
        ("[0,1,0,1]", {"every": 2}),
        ("2", {"every": 2}),
        ("[1]*4", {}),
    ],
)
def test_layers_with_experts_are_read_from_sums_and_products(pattern: str, fields: dict[str, int]) -> None:
    read = from_arguments(
        Arguments({**BASE, "num-layers": "4", "num-experts": "8", "moe-layer-freq": pattern}), devices=16
    )
    section = read.table["model"]["feed_forward"]
    assert {name: section[name] for name in ("n_dense_layers", "every") if name in section} == fields


def test_experts_on_a_latent_are_read() -> None:
    read = from_arguments(Arguments({**BASE, "num-experts": "8", "moe-latent-size": "32"}), devices=16)
    assert read.table["model"]["feed_forward"]["expert_d_model"] == 32


@pytest.mark.parametrize("pattern", ["[1]*3", "([1]*1+[0]*1)*2", "[1]*9**9", "__import__('os')", "[2]*4", "[1]*4)"])
def test_other_layers_with_experts_are_refused(pattern: str) -> None:
    assert "--moe-layer-freq" in str(said({**BASE, "num-layers": "4", "num-experts": "8", "moe-layer-freq": pattern}))


def test_what_is_said_to_change_nothing_changes_nothing() -> None:
    words = {*tables()["exact"], *(word for word in tables()["begin"] if word.isalpha())} - {*names_read()}
    for name in sorted(words):
        assert changes_nothing(name)
        assert said({**BASE, name: "2"}) == said(BASE), name

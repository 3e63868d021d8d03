"""Worked examples of public texts, each worked out again by the program: its number, how the printed one comes about,
and the command that prints it.

The rows are those of ``worked_examples.csv``. A claim holds where every number agrees within 3.8 %.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache

from claim import Claim, Numbers, Row, show
from lecture_claims import CLAIMS as OF_LECTURES

import trainledger as tl
from trainledger import catalog
from trainledger.forecast.plan.plan import step_facts
from trainledger.ledger import rules_of_thumb as thumb
from trainledger.ledger.ledger import Ledger
from trainledger.spec.dtypes import FORMATS
from trainledger.spec.parts import from_fields
from trainledger.spec.units import (
    GIB,
    GIGA,
    SECONDS_PER_DAY,
    format_count,
    format_flops,
    format_gigabytes,
    format_nbytes,
    format_seconds,
)
from trainledger.tensors.einsum import einsum, read_tensor

# Napkins

H100 = "h100-sxm"
BIG = {"params": "70B", "tokens": "15T", "device": H100, "count": 1024}
SMALL = {"params": "1.28B", "tokens": "300B", "device": H100, "count": 8}
GPT3 = {"params": "175B", "tokens": "300B", "device": H100, "count": 1024}


def words_of(given: dict[str, object]) -> str:
    return "napkin " + " ".join(f"--{name} {value}" for name, value in given.items())


def days(given: dict[str, object], mfu: float = 0.5) -> Claim:
    answer = tl.napkin(**given, mfu=mfu)
    text = format_seconds(answer.days * SECONDS_PER_DAY)
    return Claim((answer.days,), show(f"{words_of(given)} --mfu {mfu}", text))


def days_88() -> Claim:
    right, needed = tl.napkin(**BIG, mfu=0.5), tl.napkin(**BIG, days=88)
    again = tl.napkin(**BIG, mfu=needed.mfu)
    text = f"{100 * needed.mfu:.1f} %"
    return Claim((right.days,), show(f"{words_of(BIG)} --days 88", text), (again.days,), f"needs {text} MFU")


def flops(given: dict[str, object], mfu: float = 0.5) -> Claim:
    answer = tl.napkin(**given, mfu=mfu)
    return Claim(
        (answer.flops,), show(f"{words_of(given)} --mfu {mfu}", f"{answer.flops:.4g}".replace("e+", "e"), "6 N D")
    )


def two_weeks() -> Claim:
    given = {"params": "1B", "device": H100, "count": 8, "days": "2w"}
    right, half = tl.napkin(**given, mfu=1.0), tl.napkin(**given | {"days": "1w"}, mfu=1.0)
    text = f"{right.flops:.4g}".replace("e+", "e")
    return Claim(
        (right.flops,), show(f"{words_of(given)} --mfu 1", text, "FLOP"), (half.flops,), "multiplies by one week"
    )


def largest(recipe: str) -> Claim:
    """The model whose static state fills 8 x 80 GB."""
    parameters = tl.napkin(device=H100, count=8).params[recipe]
    assert thumb.static_nbytes(parameters, recipe) <= 8 * catalog.device(H100).memory_nbytes
    title = thumb.STATES[recipe].title[:20]
    return Claim((parameters,), show(f"napkin --device {H100} --count 8", title, format_count(parameters)))


def static(given: dict[str, object]) -> Claim:
    answer = tl.napkin(**given, mfu=0.5)
    nbytes = answer.static_nbytes["fp32-adamw"]
    shown = show(f"{words_of(given)} --mfu 0.5 --full", "fp32, AdamW", format_gigabytes(nbytes))
    return Claim((nbytes / GIGA,), shown)


def ratio(numerator: dict[str, object], printed: Callable[[float], float], how: str) -> Claim:
    first, second = tl.napkin(**numerator, mfu=0.5), tl.napkin(**SMALL, mfu=0.5)
    value = first.flops / second.flops
    shown = tuple(
        each for given, found in ((numerator, first), (SMALL, second))
        for each in show(f"{words_of(given)} --mfu 0.5", f"{found.flops:.4g}".replace("e+", "e"), "6 N D")
    )  # fmt: skip
    return Claim((value,), shown, (printed(value),), how)


# Tensors, products, formats


def tensor(text: str, scale: float = 1, unit: str = "bytes") -> Claim:
    one = read_tensor(text)
    shown = f"{one.nbytes / scale:,.6g}" if scale != 1 else f"{one.nbytes:,}"
    return Claim((one.nbytes / scale,), show(f'tensor "{text}"', unit, shown))


def ffn() -> Claim:
    one = tensor("fp32[49152,12288]")
    gib = f"{read_tensor('fp32[49152,12288]').nbytes / GIB:g}"
    return Claim(one.ours, (*one.shown, *show('tensor "fp32[49152,12288]"', "GiB", gib)))


def product(equation: str, *shapes: str, scale: float = 1) -> Claim:
    found = einsum(equation, [tuple(int(each) for each in shape.split(",")) for shape in shapes])
    shown = show(f'einsum "{equation}" {" ".join(shapes)}', "FLOPs", f"{found.flops:,}", format_flops(found.flops))
    return Claim((found.flops / scale,), shown)


def batched() -> Claim:
    right = product("abmk,kn->abmn", "4,8,16,32", "32,2")
    return Claim(right.ours, right.shown, (2 * right.ours[0],), "counts four operations for each term, not two")


def elementwise() -> Claim:
    one = read_tensor("fp32[1024,512]")
    return Claim((one.elementwise_flops,), show('tensor "fp32[1024,512]"', "elementwise", f"{one.elementwise_flops:,}"))


def relu() -> Claim:
    one = read_tensor("bf16[1024,512]")
    shown = show('tensor "bf16[1024,512]"', "FLOPs per byte", f"{one.elementwise_intensity:g}")
    return Claim((one.elementwise_intensity,), shown)


def rounded(name: str, number: float) -> Claim:
    rounded = FORMATS[name].rounded(number)
    return Claim((rounded.value,), show(f"dtype {number:g} --format {name}", name, f"{rounded.value:.9g}"))


def below_normal() -> Claim:
    """Taken for zero is what is below the smallest normal value; subnormals are there."""
    fp16, number = FORMATS["fp16"], 6e-5
    rounded = fp16.rounded(number)
    assert rounded.fate == "subnormal"
    taken = 0.0 if number < fp16.smallest_normal else rounded.value
    how = f"takes the smallest normal value, {fp16.smallest_normal:.3g}, for the smallest; that is "
    shown = show("dtype fp16", "smallest subnormal", f"{fp16.smallest_subnormal:.17g}")
    more = show("dtype 6e-5 --format fp16", "fp16", f"{rounded.value:.9g}", "subnormal")
    return Claim((rounded.value,), (*shown, *more), (taken,), how + f"{fp16.smallest_subnormal:.3g}")


def format_largest(name: str) -> Claim:
    largest = FORMATS[name].largest
    return Claim((largest,), show(f"dtype {name}", "largest", f"{largest:.17g}"))


def peaks(dtype: str, device: str = H100) -> float:
    found = catalog.device(device).peak_flops_per_second
    return found[dtype] / found["fp32"]


def ridge() -> Claim:
    device = catalog.device(H100)
    assert device.memory_bytes_per_second is not None
    value = device.peak_flops_per_second["bf16"] / device.memory_bytes_per_second
    return Claim((value,), show("catalog h100-sxm", "bf16", "FLOP/s", f"{value:.4g}"))


def speed(dtype: str, other: str, how: str) -> Claim:
    """A ratio of peaks, and the ratio of another device or format that was printed for it."""
    value = peaks(dtype)
    shown = show("catalog h100-sxm", dtype, f"{value:.4g} x")
    return Claim((value,), shown, (peaks(other, "a100-sxm-80gb"),), how)


# Models

# 24 GELU blocks 2048 wide with one matrix for embedding and head: a model of the catalog made into that shape.
CHANGES = (
    "model.vocab_size=32000", "model.tie_embeddings=true", "model.block=serial", "model.attention.bias=false",
    "model.feed_forward.bias=false", "recipe.global_batch=8", "recipe.precision=bf16", "cluster.device=h100-sxm",
)  # fmt: skip
LIKE_IT = f"pythia-1.4b {' '.join(f'--set {each}' for each in CHANGES)}"


def run_of(*more: str) -> tl.Run:
    recipe = {"seq_len": 2048, "global_batch": 1, "steps": 1}
    return tl.load({"model": {"preset": "pythia-1.4b"}, "recipe": recipe}, (*CHANGES, *more))


@cache
def shape() -> Ledger:
    return tl.account(run_of())


def blocks(d_model: int, n_layers: int, model: str) -> Claim:
    value = thumb.block_parameters(d_model, n_layers)
    return Claim((value,), show(f"rules {model}", "12 d^2 L  ", format_count(value)))


def with_embedding() -> Claim:
    value = thumb.block_parameters(2048, 24) + 32000 * 2048
    return Claim((value,), show(f"rules {LIKE_IT}", "12 d^2 L + V d", format_count(value)))


def tying() -> Claim:
    """What tying saves: the head, counted in a model with one and in one without."""
    sizes = {
        "vocab_size": 50257,
        "d_model": 1024,
        "n_layers": 1,
        "attention.n_heads": 16,
        "feed_forward.d_ff": 4096,
        "max_seq_len": 8,
    }
    tied, apart = (
        tl.parameters(from_fields(tl.ModelSpec, {"tie_embeddings": each, **sizes})).total for each in (True, False)
    )
    one = read_tensor("fp32[50257,1024]")
    assert apart - tied == one.elements
    shown = show('tensor "fp32[50257,1024]"', "elements", f"{one.elements:,}")
    found = show('tensor "fp32[50257,1024]"', "MB", f"{one.nbytes / 1e6:,.6g}")
    how = f"in no way: 51.9M x 4 are {51.9e6 * 4 / 1e6:.1f} MB, no number of parameters"
    return Claim((apart - tied,), (*shown, *found), None, how)


def forward() -> Claim:
    value = thumb.forward_flops_per_token(tl.parameters(run_of().model).total)
    return Claim((value / GIGA,), show(f"rules {LIKE_IT}", "2 N, forward", format_flops(value)))


def scores() -> Claim:
    return tensor("fp32[32,32,2048,2048]", GIGA, "GB")


def activations() -> Claim:
    ledger = shape()
    rule = thumb.activation_nbytes_napkin(24, 8, 2048, 2048)
    shown = show(f"rules {LIKE_IT}", "2 B T d L", format_nbytes(rule), format_nbytes(ledger.kept_nbytes))
    how = f"twice the rule's own {format_nbytes(rule)}: 4 bytes for one tensor of each block"
    return Claim((ledger.kept_nbytes / GIGA,), shown, (2 * rule / GIGA,), how)


def budget() -> Claim:
    given = {"tokens": "20x", "device": H100, "count": 32, "days": "2w"}
    answer = tl.napkin(**given, mfu=0.5)
    texts = f"{answer.params / GIGA:.1f}B parameters", f"{answer.tokens / GIGA:.0f}B tokens"
    optimal = show("optimal --device h100-sxm --count 32 --days 2w --family none", *texts)
    return Claim((answer.params,), (*show(f"{words_of(given)} --mfu 0.5", f"{answer.params:.4g}"[:5]), *optimal))


# Facts of a step

STEP = (
    "rules gpt2 --full --set recipe.global_batch=4 --set recipe.micro_batch=1 --set recipe.optimizer.beta2=0.999 "
    "--set cluster.device=l4"
)


def step_fact(what: str, theirs: Numbers) -> Claim:
    run = tl.load(
        {
            "model": {"preset": "gpt2"},
            "recipe": {"seq_len": 1024, "global_batch": 4, "micro_batch": 1, "steps": 1, "optimizer": {"beta2": 0.999}},
            "cluster": {"device": "l4"},
        }
    )
    fact = next(each for each in step_facts(run, tl.account(run)) if each.what == what)
    return Claim(fact.numbers[: len(theirs)], show(STEP, what, fact.sentence), theirs)


OPTIMIZERS = {
    "sgd": ("fp32, SGD ", 8), "momentum": ("momentum (RMSProp", 12), "adagrad": ("momentum (RMSProp", 12),
    "rmsprop": ("momentum (RMSProp", 12), "adamw": ("fp32, AdamW", 16), "adafactor": ("Adafactor", 8),
}  # fmt: skip


def optimizers() -> Claim:
    """Weights, gradients and states of each optimizer, counted for a model in fp32."""
    ours = []
    for name in OPTIMIZERS:
        ledger = tl.account(run_of("recipe.precision=fp32", f"recipe.optimizer={name}"))
        held = dict(ledger.resident)
        nbytes = held["parameters"] + held.get("optimizer state", 0) + 4 * ledger.parameters
        ours.append(round(nbytes / ledger.parameters, 2))
    lines = tuple(
        each for title, nbytes in dict.fromkeys(OPTIMIZERS.values())
        for each in show(f"{words_of(SMALL)} --mfu 0.5 --full", title, f"= {nbytes} ")
    )  # fmt: skip
    return Claim(tuple(ours), lines, tuple(float(nbytes) for _, nbytes in OPTIMIZERS.values()))


CLAIMS: dict[str, Callable[[], Claim]] = {
    "days_70b": lambda: days(BIG),
    "days_70b_88": days_88,
    "flops_70b": lambda: flops(BIG),
    "flops_gpt3": lambda: flops(GPT3),
    "flops_8h100_2w": two_weeks,
    "fit_8h100_16b": lambda: largest("fp32-adamw"),
    "fit_8h100_12b": lambda: largest("bf16-fp32-moments-adamw"),
    "static_70b": lambda: static(BIG),
    "tensor_4x8_fp32": lambda: tensor("fp32[4,8]"),
    "tensor_4x8_bf16": lambda: tensor("bf16[4,8]"),
    "gpt3_ffn": ffn,
    "matmul_1024_512_256": lambda: product("ij,jk->ik", "1024,512", "512,256"),
    "elementwise_1024_512": elementwise,
    "matmul_batched": batched,
    "matmul_4096": lambda: product("ij,jk->ik", "1024,4096", "4096,4096", scale=GIGA),
    "ridge_h100": ridge,
    "relu_intensity": relu,
    "fp16_underflow": lambda: rounded("fp16", 1e-8),
    "bf16_no_underflow": lambda: rounded("bf16", 1e-8),
    "fp16_min": below_normal,
    "fp16_max": lambda: format_largest("fp16"),
    "e4m3_max": lambda: format_largest("e4m3"),
    "e5m2_max": lambda: format_largest("e5m2"),
    "fp8_speed": lambda: speed("fp8", "tf32", "is what tf32 is of fp32 on an A100"),
    "bf16_vs_fp32_h100": lambda: speed("bf16", "bf16", "is the A100's ratio"),
    "params_1_2b": lambda: blocks(2048, 24, LIKE_IT),
    "params_1_28b": with_embedding,
    "params_150m": lambda: blocks(1024, 12, "gpt2 --set model.d_model=1024 --set model.attention.n_heads=16 "
                                  "--set model.feed_forward.d_ff=4096 --set cluster.device=l4"),
    "tying_saving": tying,
    "static_1_28b": lambda: static(SMALL),
    "forward_per_token": forward,
    "flops_300b": lambda: flops(SMALL),
    "days_1_28b": lambda: days(SMALL),
    "gpt3_vs_1_28b": lambda: ratio(GPT3, lambda value: 10.0 ** round(math.log10(value)), "is the order of magnitude"),
    "llama70_vs_1_28b": lambda: ratio(BIG, lambda value: 70 / 1.28, "is the ratio of the parameters alone"),
    "scores_memory": scores,
    "act_rule_of_thumb": activations,
    "fit_32h100_2w": budget,
    "clip_joint": lambda: step_fact("gradients are cut by", (1.0,)),
    "adam_horizon": lambda: step_fact("moments average", (10.0, 1000.0)),
    "optimizer_bytes": optimizers,
    "accumulate_scale": lambda: step_fact("micro-batches", (4.0,)),
    **OF_LECTURES,
}  # fmt: skip


def claim_of(row: Row) -> Claim:
    """The claim of a row, worked out."""
    return CLAIMS[row["id"]]()

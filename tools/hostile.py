"""Texts that nobody means: numbers beyond all bounds, other alphabets, nested files. For tests and `fuzz_api`."""

# ruff: noqa: SIM905  (words with spaces between them are read at a glance)

from __future__ import annotations

import json
import random
from collections.abc import Iterator

from trainledger.spec.reading import paths
from trainledger.spec.runfile import SECTIONS
from trainledger.web.calculator import Calculator
from trainledger.web.field import CONFIG, FILE, Field

NUMBERS = (
    *"0 -0 -1 1 2 3 7 0.1 1e-9 1e-320 1e9 1e12 1e18 1e24 1e36 1e308 1e309 -1e308 1e9999999999 nan inf -inf".split(),
    *"NaN% 1e18% -5% 999999999 2147483648 18446744073709551616 1_000 1,000 1'000 0x10 1e 1e+ + - --1 . 1..2".split(),
    *"1/0 1:0 20x 1e30x x 1T 9e99T 1e18B 1w 1e20y -3d".split(),
    *("10 GB", "1e30 TiB", "9" * 300, "0." + "0" * 290 + "1", "٣", "１２", "²", "½", "𝟙"),
)
WORDS = (
    *"auto none None null true false [] {} [1,2] '' ../../etc/passwd /etc/passwd file:///etc/passwd __class__".split(),
    *"<script>alert(1)</script> {0} %s%n ${HOME} gpt2 llama-3-8b h100-sxm bf16 adamw a=b 1;2 (1,) 1+1 * ** ->".split(),
    *("", " ", "\t", "\n", "\x00", "\x1b[31m", "\u202eabc", "\ufeff1", "五", "ℵ", "é" * 100, "a" * 300, '"', "'", "\\"),
    *('{"a": 1}', "; rm -rf /", "1 2", "(" * 150 + ")" * 150, "[" * 300, "-" * 300, "...", "é,é->é", "a" * 150 + "->"),
    *("b t d, d f -> b t f", "view(-1)", "transpose(0, 1)", "reshape(-1, -1)", "expand(1000000000, 1000000000)"),
    *("view(" + "1," * 140 + ")", "1000000000x1000000000x1000000000", "1000000000, 1000000000", "1," * 149 + "1"),
    *("0, 0", "2, -1", "64, 1e9", ",".join(["8"] * 100), "x".join(["2"] * 100), ",".join(map(str, range(1, 60)))),
)
_SIZES = (
    *"hidden_size num_hidden_layers num_attention_heads num_key_value_heads intermediate_size vocab_size".split(),
    *"head_dim max_position_embeddings rope_theta tie_word_embeddings num_experts num_experts_per_tok".split(),
    *"n_layer n_embd n_head sliding_window rope_scaling model_type layer_types torch_dtype".split(),
)
_LLAMA = {
    "model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "intermediate_size": 128, "vocab_size": 256, "num_key_value_heads": 2,
}  # fmt: skip
_VALUES = (
    *(0, -1, 1.5, 10**9, 10**12, 10**18, 10**40, 10**400, float("nan"), float("inf"), 1e308, None, True, "", "8"),
    *([], [1] * 50, {}, {"rope_type": "yarn", "factor": 1e300}, [[[]]], "\x00", ["full_attention"] * 9),
)
_TOML = (
    *'0 -1 1e18 nan inf true [] {} "x" 1979-05-27 1000000007 12 "/etc/passwd" [[1]] 0x7fffffffffffffff'.split(),
    "9" * 30,
)


def values_of(field: Field, drawn: random.Random) -> Iterator[str]:
    """Hostile texts for a field: of any, those of its own slider and list, and whole files where it takes one."""
    yield from NUMBERS
    yield from WORDS
    yield from (each for each, _ in field.choices[:3])
    yield from (each + "0" * 12 for each in field.stops[-1:])
    yield from (f"{each}," * 20 for each in field.stops[:1])
    if field.name == CONFIG:
        yield from configs(drawn)
    if field.name == FILE:
        yield from run_files(drawn)
    if field.long:
        yield "\n".join(["transpose(0, 1)"] * 1000)
        yield "1\n" * 9_000


def configs(drawn: random.Random) -> Iterator[str]:
    """Files that are no config.json, or one of a model that cannot be."""
    yield from (
        "{",
        "[]",
        "1",
        '""',
        "[" * 9_000,
        '{"a":' * 3_000,
        '{"a": ' + "9" * 15_000 + "}",
        "{" + '"a":1,' * 3_000 + "}",
    )
    yield json.dumps(_LLAMA)
    for name in _SIZES:
        for value in drawn.sample(_VALUES, 8):
            yield json.dumps(_LLAMA | {name: value})
    for family in ("gpt2", "qwen3_moe", "deepseek_v3", "gemma3_text", "mamba", "bert", "gpt_oss", "\x00"):
        yield json.dumps(_LLAMA | {"model_type": family})
        yield json.dumps(_LLAMA | {"model_type": family, "num_hidden_layers": 10**9})


def run_files(drawn: random.Random) -> Iterator[str]:
    """TOML that is none, is a bomb, or describes a run that cannot be."""
    yield from (
        "=",
        "[model]",
        "a" * 19_000,
        "[[" * 5_000,
        "a = " + "[" * 5_000,
        "a = " + "{a=" * 3_000,
        ".".join("a" * 5_000) + "=1",
    )
    yield "\n".join(f"[a{at}]" for at in range(2_000))
    yield "a = '''" + "x" * 18_000 + "'''"
    yield "a = " + "9" * 15_000
    model = '[model]\npreset = "gpt2"\n'
    for path in paths(SECTIONS):
        section, _, name = path.partition(".")
        for value in drawn.sample(_TOML, 3):
            own = f"{name} = {value}\n"
            yield f"{model}{own}" if section == "model" else f"{model}[{section}]\n{own}"


def queries(calculator: Calculator, seed: int = 0) -> Iterator[dict[str, str]]:
    """Each field of a calculator with each hostile text, then some with several at once."""
    drawn = random.Random(seed)
    any_field = [Field(name=each, title="") for each in paths(SECTIONS)] if calculator.any_of_run else []
    every = {field.name: list(dict.fromkeys(values_of(field, drawn))) for field in calculator.fields}
    for field in any_field:
        every.setdefault(field.name, drawn.sample(NUMBERS, 8))
    presets = [dict(each) for each in calculator.presets.values()] or [{}]
    for name, texts in every.items():
        yield from ({**(presets[0] if drawn.random() < 0.5 else {}), name: text} for text in texts)
    for _ in range(20 * len(every)):
        some = drawn.sample(sorted(every), min(len(every), drawn.randint(2, 4)))
        yield {**drawn.choice(presets), **{name: drawn.choice(every[name]) for name in some}}

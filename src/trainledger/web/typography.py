"""Printed text as a page shows it: ×, −, µ and powers of ten, titles of models and devices, words for names of code."""

from __future__ import annotations

import re
from functools import cache

from trainledger import catalog
from trainledger.spec.units import format_flops_per_second, format_nbytes
from trainledger.web.calculators import CALCULATORS

_RAISED = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
_LOWERED = {raised: plain for plain, raised in _RAISED.items()}
_ROOT = r"recipe|layout|model|cluster|data|teacher"
# What is left as it is, then what is written in another way; the name of a group says how. Quoted text is typed so.
_WRITTEN = re.compile(
    r"""(?P<kept><(?P<tag>pre|code)\b.*?</(?P=tag)>|<[^>]*>|"[^"<]{,40}")"""
    r"|(?P<power>(?<![\w.])\d+(?:\.\d+)?e[+-]?\d+(?![\w.]\d|\w))"
    r"|\^(?P<raised>-?\d+)(?![\d.]*\.\d)"
    r"|(?P<times>(?<=[\w)\]%²³])(?<! of)(?<! by)(?<! in)(?<! to)(?<! is)(?<! and)(?<! for) x (?=[\w([])"
    r"|(?<=\d)x(?![\w.(]))"
    r"|(?P<micro>(?<=\d )us\b)"
    r"|(?P<minus>(?<=[\w)\]%²³] )-(?= [\w(])|(?<![\w.([,-])(?<!, )-(?=\d))"
    r"|(?P<root>\bsqrt(?=\())"
    r"|(?P<name>(?<![\w./=-])(?=[a-z-]*\d)[a-z][a-z0-9.-]*[a-z0-9](?![\w/=-]))",
    re.DOTALL,
)
_MODULE = re.compile(r"[:;,]? \(?(?:ledger|predict|plan)(?:\.[a-z_]+)+\)?")
_SNAKE = re.compile(r"(?<![\w.=/(-])[a-z]+(?:_[a-z]+)+(?![\w.=/(])")
_CODE = re.compile(rf"(?<![\w.])(?:{_ROOT})(?:\.[a-z_]\w*)+")


def typeset(text: str) -> str:
    """A text, or markup, whose printed numbers and names are those of a page.

    >>> typeset("6 x 8e09 x 1.5e13 = 7.200e+23 FLOP in 12 us on 8 x h100-sxm, 2^-10 - 1")
    '6 × 8\\xa0×\\xa010⁹ × 1.5\\xa0×\\xa010¹³ = 7.2\\xa0×\\xa010²³ FLOP in 12 µs on 8 × H100 SXM, 2⁻¹⁰ − 1'
    """
    return _WRITTEN.sub(_written, text)


def _written(match: re.Match[str]) -> str:
    kind, text = match.lastgroup, match[0]
    if kind == "tag" or match["kept"]:
        return text
    if kind == "power":
        mantissa, _, exponent = text.partition("e")
        power = f"10{str(int(exponent)).translate(_RAISED)}"
        if float(mantissa) == 1:
            return power
        product = f"{float(mantissa):.12g}\N{NO-BREAK SPACE}×\N{NO-BREAK SPACE}{power}"
        start, end, whole = *match.span(), match.string
        return f"({product})" if whole[max(0, start - 2) : start] == "/ " or whole[end : end + 1] == "^" else product
    if kind == "raised":
        return match["raised"].translate(_RAISED)
    if kind == "name":
        return title_of(text)
    return text.replace("x", "×").replace("us", "µs").replace("-", "−").replace("sqrt", "√")


def typed(text: str) -> str:
    """A number that is printed on a page, as one types it.

    >>> typed("3.39\\xa0×\\xa010³⁸"), typed("10⁻⁸"), typed("−3 GB")
    ('3.39e38', '1e-8', '-3 GB')
    """

    def lowered(match: re.Match[str]) -> str:
        return f"{match[1] or 1}e{match[2].translate(_LOWERED)}"

    return re.sub(r"(?:([\d.]+)\s*×\s*)?10([⁻⁰¹²³⁴-⁹]+)", lowered, text).replace("−", "-")


def in_words(text: str) -> str:
    """A sentence without names of code, which a page does not show: a field of a run has its label.

    >>> in_words("recipe.seq_len = 3: must be even, as model.attention.n_heads is")
    'sequence length = 3: must be even, as query heads is'
    >>> in_words("shard 8, reshard_after_forward, micro_batch 1")
    'shard 8, reshard after forward, micro-batch 1'
    """
    named = _CODE.sub(lambda match: _label(match[0]), _MODULE.sub("", text))
    return typeset(_SNAKE.sub(lambda match: _label(f"recipe.{match[0]}"), named))


def _label(path: str) -> str:
    return _labels().get(path) or path.rpartition(".")[2].removeprefix("n_").replace("_", " ")


@cache
def _labels() -> dict[str, str]:
    """What the forms call a field of a run."""
    fields = (field for calculator in CALCULATORS.values() for field in calculator.fields)
    return {field.name: field.title for field in fields if "." in field.name}


@cache
def title_of(name: str) -> str:
    """A model or a device of the catalog as sentences name it; any other word as it is.

    >>> [title_of(name) for name in ("h100-sxm", "a100-sxm-80gb", "tpu-v4", "llama-3-8b", "fp8")]
    ['H100 SXM', 'A100 SXM 80 GB', 'TPU v4', 'Llama 3 8B', 'fp8']
    """
    if name in catalog.model_names():
        return str(catalog.model_entry(name)["title"])
    if name not in catalog.device_names():
        return name
    return _short(name) if re.search(r"\d+gb", name) else re.sub(r" \d+ GB\b", "", _short(name))


def _short(name: str) -> str:
    """The title of a device without its maker and remarks."""
    title = re.sub(r"^(NVIDIA|AMD|Google) | \(.*\)| at .*", "", catalog.device(name).title)
    return re.sub(r"(\d)GB\b", r"\1 GB", title)


@cache
def device_title(name: str) -> str:
    """A device with its memory and its dense rate.

    >>> device_title("h100-sxm")
    'H100 SXM, 80 GB, 989.5 TFLOP/s'
    """
    device = catalog.device(name)
    rates = device.peak_flops_per_second
    peak = rates.get("bf16") or rates.get("fp16")
    memory = format_nbytes(device.memory_nbytes) if device.memory_nbytes else ""
    title = re.sub(r" \d+ GB\b", "", _short(name))
    return ", ".join(filter(None, (title, memory, format_flops_per_second(peak) if peak else "")))

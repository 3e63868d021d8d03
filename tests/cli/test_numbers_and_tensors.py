"""The verbs of numbers, tensors and products: what they print, as JSON too, and that they start without torch."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from trainledger.cli import LIGHT, main


def call(capsys, *words):
    code = main(list(words))
    out, err = capsys.readouterr()
    return code, out, err


CALLS = [
    ("dtype",), ("dtype", "1e-8"), ("dtype", "-65520"), ("dtype", "fp16"), ("dtype", "3.4e38", "--format", "half"),
    ("tensor", "float32[4,8]"), ("tensor", "nvfp4[4096,4096]"), ("tensor", "int64[]"),
    ("einsum", "ij,jk->ik", "1024,512", "512,256", "--dtype", "bf16", "--device", "h100-sxm"),
    ("einsum", "ab,bc,cd,de->ae", "10,1000", "1000,10", "10,1000", "1000,10"),
    ("einsum", "ij,jk->ik", "8,8", "8,8", "--dtype", "fp64", "--device", "l4"),
    ("catalog", "h100-sxm"),
]  # fmt: skip


@pytest.mark.parametrize("words", CALLS, ids=" ".join)
def test_it_fits_80_columns_and_is_json_too(capsys, words):
    code, out, err = call(capsys, *words)
    assert (code, err) == (0, "")
    assert max(len(line) for line in out.splitlines()) <= 80
    json.loads(call(capsys, *words, "--json")[1])


def test_a_number_in_every_format(capsys):
    told = {each["format"]: each for each in json.loads(call(capsys, "dtype", "1e-8", "--json")[1])["formats"]}
    assert told["fp16"] == {
        "format": "fp16", "value": 0.0, "fate": "underflow", "relative_error": -1.0, "spacing": 2**-24, "sign": "0",
        "exponent": "00000", "mantissa": "0000000000",
    }  # fmt: skip
    assert told["bf16"]["value"] == pytest.approx(1.0012e-8, rel=1e-4)
    assert "underflows to zero" in call(capsys, "dtype", "1e-8")[1]
    assert json.loads(call(capsys, "dtype", "1e9", "--format", "fp16", "--json")[1])["formats"][0]["value"] == "inf"


def test_the_cheapest_order_of_a_chain(capsys):
    out = call(capsys, "einsum", "ab,bc,cd,de->ae", "10,1000", "1000,10", "10,1000", "1000,10")[1]
    assert "bc,cd->bd" not in out
    assert "402,000" in out.replace("402,000 ", "402,000 ")


def test_a_rate_that_is_not_known_is_a_sentence(capsys):
    out = call(capsys, "einsum", "ij,jk->ik", "8,8", "8,8", "--dtype", "fp64", "--device", "l4")[1]
    assert "No time: NVIDIA L4 has no peak for fp64 on record" in " ".join(out.split())


@pytest.mark.parametrize(("words", "sentence"), [
    (("dtype", "1e-8x"), "value = '1e-8x': is neither a number (write it like 1e-8, 0.1 or 65504) nor a "),
    (("dtype", "bfloat17"), "nearest that works: bfloat16"),
    (("dtype", "1", "--format", "int8"), "--format = 'int8': is no floating-point format that is known"),
    (("dtype", "1e999"), "must be a finite number that fp64 holds; nearest that works: 1.7976931348623157e+308"),
    (("tensor", "float32"), "tensor = 'float32': must be a format and a shape in brackets"),
    (("einsum", "ij,jk->ik", "4,8"), "has 2 operands, and 1 shapes are given"),
    (("einsum", "ij,jk->ik", "4,8", "8,2", "--device", "h101"), "--device = 'h101': is not in the catalog"),
    (("einsum", "ij,jk->ik", "4,8", "8,x"), "shape 2 = '8,x': has dims that are no whole numbers"),
])  # fmt: skip
def test_wrong_input_is_a_sentence(capsys, words, sentence):
    code, out, err = call(capsys, *words)
    assert (code, out) == (2, "")
    assert sentence in err


@pytest.mark.parametrize("verb", [("dtype", "1e-8"), ("tensor", "fp32[2]"), ("einsum", "ij,jk->ik", "2,2", "2,2"),
                                  ("plan", "--phase", "decode", "gpt2", "--set", "cluster.device=l4")])  # fmt: skip
def test_nothing_heavy_is_imported(verb):
    assert verb[0] in LIGHT
    program = (
        "import sys\nfrom trainledger.cli import main\nmain(sys.argv[1:])\n"
        "heavy = {'torch', 'numpy', 'sympy', 'rich', 'plotly'} & set(sys.modules)\nassert not heavy, heavy\n"
    )
    done = subprocess.run([sys.executable, "-c", program, *verb], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr

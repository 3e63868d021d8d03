"""The verbs of numbers, tensors and einsums: what they print, as JSON too, and that they start without torch."""

import json
import subprocess
import sys

import pytest

from trainledger.cli import main


def call(capsys, *words):
    code = main(list(words))
    out, err = capsys.readouterr()
    return code, out, err


CALLS = [
    ("dtype",), ("dtype", "1e-8"), ("dtype", "-65520"), ("dtype", "-1e-8"), ("dtype", "-.5"),
    ("dtype", "fp16"), ("dtype", "3.4e38", "--format", "half"), ("dtype", "--json", "-1E-8"),
    ("dtype", "tf32"), ("dtype", "e4m3"), ("dtype", "fp8"), ("dtype", "fp8", "0.0123"), ("dtype", "-1e-8", "fp4"),
    ("dtype", "0.3", "--largest", "6"), ("dtype", "nvfp4", "--largest=2", "-0.3"), ("dtype", "nf4"),
    ("dtype", "int", "3.7"), ("dtype", "int8"), ("dtype", "MXFP4", "0.3"), ("dtype", "int", "bf16", "-3e9"),
    ("tensor", "float32[4,8]"), ("tensor", "nvfp4[4096,4096]"), ("tensor", "int64[]"),
    ("tensor", "float32[4,8]", "transpose", "contiguous", "view:2,16", "--at", "1,2"),
    ("tensor", "float32[4,8]", "--at", "-1,0"), ("tensor", "float32[4,8]", "--draw"),
    ("tensor", "bf16[2,3]", "t", "--draw"),
    ("tensor", "bf16[4096,4096]", "t", "reshape", "view:128,-1", "[1:,::2]", "to:float32", "expand(8,127,65536)"),
    ("tensor", "fp32[8,3,32,32]", "contiguous(channels_last)", "rearrange('b c (h p) w -> b (c p) h w', p=2)", "half"),
    ("einsum", "batch seq d_model, d_model d_ff -> batch seq d_ff", "8,128,512", "512,2048", "--dtype", "bf16"),
    ("einsum", "...ij,...jk", "2,3,4", "2,4,5"), ("einsum", "ij->ji", "--dtype", "bf16", "2,3"),
    ("einsum", "b (h d) t -> b h t d", "2,64,10", "h=8"), ("einsum", "b c h w -> b c h w 3", "2,3,4,4"),
    ("einsum", "b c (h 2) (w 2) -> b c h w", "2,3,8,8", "--reduce", "mean"),
    ("einsum", "ij,jk->ik", "1024,512", "512,256", "--dtype", "bf16", "--device", "h100-sxm"),
    ("einsum", "ij,jk->ik", "4096,4096", "4096,4352", "--dtype=bf16", "--device=h100-sxm,b200,l4"),
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
    answer = {each["format"]: each for each in json.loads(call(capsys, "dtype", "1e-8", "--json")[1])["formats"]}
    assert answer["fp16"] == {
        "format": "fp16", "value": 0.0, "fate": "underflow", "relative_error": -1.0, "spacing": 2**-24, "sign": "0",
        "exponent": "00000", "mantissa": "0000000000",
    }  # fmt: skip
    assert answer["bf16"]["value"] == pytest.approx(1.0012e-8, rel=1e-4)
    assert "underflows to zero" in call(capsys, "dtype", "1e-8")[1]
    assert json.loads(call(capsys, "dtype", "1e9", "--format", "fp16", "--json")[1])["formats"][0]["value"] == "inf"


def test_a_number_in_the_formats_that_a_name_means(capsys):
    def held(*words):
        return {
            each["format"]: each["value"] for each in json.loads(call(capsys, "dtype", *words, "--json")[1])["formats"]
        }

    assert held("fp8", "0.0123") == {"e4m3": 0.01171875, "e5m2": 0.01171875}
    assert held("0.0123", "fp4") == {"e2m1": 0.0}
    assert held("nvfp4", "5") == {"e2m1": 4.0}
    assert held("int", "200.7") == {"int64": 200, "int32": 200, "int16": 200, "int8": None, "uint8": 200}
    assert held("3", "--format", "fp8") == {"e4m3": 3.0, "e5m2": 3.0}
    assert "out of range" in call(capsys, "dtype", "int8", "200")[1]
    assert "one e8m0 scale" in call(capsys, "dtype", "mxfp8", "0.3")[1]


def test_the_cheapest_order_of_a_chain(capsys):
    out = call(capsys, "einsum", "ab,bc,cd,de->ae", "10,1000", "1000,10", "10,1000", "1000,10")[1]
    assert "bc,cd->bd" not in out
    assert "402,000" in out.replace("402,000 ", "402,000 ")


def test_a_rate_that_is_not_known_is_a_sentence(capsys):
    out = call(capsys, "einsum", "ij,jk->ik", "8,8", "8,8", "--dtype", "fp64", "--device", "l4")[1]
    assert "No time: NVIDIA L4 has no peak for fp64 on record" in " ".join(out.split())


@pytest.mark.parametrize(("words", "sentence"), [
    (("dtype", "1e-8x"), "value = '1e-8x': is neither a number (write it like 1e-8, 0.1 or 65504) nor a "),
    (("dtype", "fp8", "1", "2"), "value = '2': is a second number; one is shown at a time"),
    (("dtype", "bfloat17"), "nearest that works: bfloat16"),
    (("dtype", "1", "--format", "bool"), "--format = 'bool': is not a known floating-point format"),
    (("dtype", "mxfp4", "--largest", "6"), "--largest = '6': is of a block with a number in it; give the number too"),
    (("dtype", "1e999"), "must be a finite number that fp64 holds; nearest that works: 1.7976931348623157e+308"),
    (("dtype", "-inf"), "must be a finite number that fp64 holds; nearest that works: -1.7976931348623157e+308"),
    (("dtype", "1e-400"), "is too small for fp64 and would be read as zero; nearest that works: 5e-324"),
    (("dtype", "-0.2e-323"), "nearest that works: -5e-324"),
    (("tensor", "float32"), "tensor = 'float32': must be a format and a shape in brackets"),
    (("tensor", "float32[4,8]", "viiew"), "operations = 'viiew': is no operation that is known here ("),
    (("tensor", "float32[4,8]", "--at", "9,9"), "--at = '9,9': fp32[4, 8] has 4 in dim 0, and the index asks for 9"),
    (("tensor", "float32[4,8]", "t", "--at", "x"), "--at = 'x': is no index; write it like 1,2"),
    (("tensor", "mxfp4[32]", "t"), "so that no element has an address; nearest that works: uint8"),
    (("einsum", "b (h d) -> b h d", "2,8", "h=x"), "size = 'h=x': is no size of a dim; write it like h=8"),
    (("einsum", "b (h d) -> b h d", "2,8", "2,8", "h=2"), "is a pattern on one tensor, and 2 shapes are given"),
    (("einsum", "b (h d) -> b h d", "2,8", "h=2", "--device", "l4"), "--device = 'l4': bounds the time of an einsum"),
    (("einsum", "b (h d) -> b h d", "2,8", "h=3"), "splits dim 1 by 3, and fp32[2, 8] has 8 there; nearest that works: "
                                                   "h=2"),
    (("einsum", "ij,jk->ik", "4,8"), "has 2 operands, but 1 shape given"),
    (("einsum", "ij,jk->ik", "4,8", "8,2", "--device", "h101"), "--device = 'h101': is not in the catalog"),
    (("einsum", "ij,jk->ik", "4,8", "8,x"), "shape 2 = '8,x': has dims that are no whole numbers"),
])  # fmt: skip
def test_wrong_input_is_a_sentence(capsys, words, sentence):
    code, out, err = call(capsys, *words)
    assert (code, out) == (2, "")
    assert sentence in err


def test_a_chain_that_fails_shows_the_steps_before(capsys):
    code, out, err = call(capsys, "tensor", "float32[4,8]", "transpose", "view", "--at", "1,2")
    assert code == 2
    plain = " ".join(out.split())
    assert "1 transpose fp32[8,4] [1,8] no A view 2 view fails" in plain
    assert "1 transpose 17 of A 68" in plain
    assert "| 3 | 7 | 11 |" in plain
    assert err.startswith(
        "step 2, view: fp32[8, 4] with strides [1, 8] cannot be viewed as [32]: dims 0 and 1 would be "
    )
    assert err.rstrip().endswith("nearest that works: reshape(32), a copy of 128 bytes")
    code, out, err = call(capsys, "tensor", "float32[4,8]", "transpose", "view", "--at", "1,2", "--json")
    answer = json.loads(out)
    assert code == 2
    assert answer["error"][0]["field"] == "step 2, view"
    assert [(each["operation"], each["kind"], each["element"]) for each in answer["steps"]] == [
        ("transpose", "view", {"place": 17, "byte": 68})
    ]  # fmt: skip


def test_a_chain_as_json(capsys):
    answer = json.loads(call(capsys, "tensor", "float32[4,8]", "transpose", "reshape", "half", "--json")[1])
    assert answer["shape"] == [4, 8]  # of the tensor alone, as without operations
    assert [(each["kind"], each["written_nbytes"], each["storage"], each["dtype"]) for each in answer["steps"]] == [
        ("view", 0, 0, "fp32"), ("copy", 128, 1, "fp32"), ("copy", 64, 2, "fp16")
    ]  # fmt: skip
    assert (answer["written_nbytes"], answer["shares"], answer["start"]["contiguous"]) == (192, False, True)


def test_without_operations_all_is_as_it_was(capsys):
    out = call(capsys, "tensor", "fp32[4,8]")[1]
    assert out.startswith("fp32[4, 8]\n-------------------  ------\nelements                 32\nbytes          ")
    assert set(json.loads(call(capsys, "tensor", "fp32[4,8]", "--json")[1])) == {
        "dtype", "shape", "elements", "nbytes", "strides", "elementwise"
    }  # fmt: skip


def test_words_stand_behind_flags_too(capsys):
    first = call(capsys, "tensor", "--at", "1,2", "float32[4,8]", "transpose", "contiguous")
    assert first == call(capsys, "tensor", "float32[4,8]", "--at", "1,2", "transpose", "contiguous")
    one = call(capsys, "einsum", "ij,jk->ik", "--dtype", "bf16", "4,8", "8,2")
    assert one == call(capsys, "einsum", "ij,jk->ik", "4,8", "8,2", "--dtype", "bf16")


def test_patterns_of_einops(capsys):
    answer = json.loads(call(capsys, "einsum", "b (h d) t -> b h t d", "2,64,10", "h=8", "--json")[1])
    assert (answer["function"], answer["view"], answer["shape"], answer["nbytes"]) == (
        "rearrange",
        True,
        [2, 8, 10, 8],
        0,
    )
    assert answer["sizes"] == {"b": 2, "h": 8, "d": 8, "t": 10}
    assert "A view: nothing is copied." in call(capsys, "einsum", "b (h d) t -> b h t d", "2,64,10", "h=8")[1]
    out = call(capsys, "einsum", "b c (h 2) (w 2) -> b c h w", "2,3,8,8", "--reduce", "mean")[1]
    assert "FLOPs          384  384 FLOP" in out
    assert "bytes moved  1,920   1.92 kB" in out
    words = json.loads(call(capsys, "einsum", "b t d_in, d_in d_out -> b t d_out", "2,8,4", "4,6", "--json")[1])
    letters = json.loads(call(capsys, "einsum", "bti,io->bto", "2,8,4", "4,6", "--json")[1])
    assert [words[each] for each in ("flops", "nbytes", "shape")] == [
        letters[each] for each in ("flops", "nbytes", "shape")
    ]
    assert "torch returns a view" in call(capsys, "einsum", "ij->ji", "2,3")[1]


@pytest.mark.parametrize("verb", [("dtype", "1e-8"), ("tensor", "fp32[2]"), ("einsum", "ij,jk->ik", "2,2", "2,2"),
                                  ("tensor", "fp32[2,3]", "t", "reshape", "--at", "0,0"),
                                  ("einsum", "b (h d) -> b h d", "2,8", "h=2"),
                                  ("plan", "--phase", "decode", "gpt2", "--set", "cluster.device=l4")])  # fmt: skip
def test_nothing_heavy_is_imported(verb):
    program = (
        "import sys\nfrom trainledger.cli import main\nmain(sys.argv[1:])\n"
        "heavy = {'torch', 'numpy', 'sympy', 'rich', 'plotly'} & set(sys.modules)\nassert not heavy, heavy\n"
    )
    done = subprocess.run([sys.executable, "-c", program, *verb], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("zero", ["0", "-0", "0e-999", "0.00"])
def test_zero_is_zero_however_it_is_written(capsys, zero):
    code, out, err = call(capsys, "dtype", zero)
    assert (code, err) == (0, "")
    assert "0.0 rounded to the nearest value of each format" in out

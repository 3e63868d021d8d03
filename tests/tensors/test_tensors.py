"""Tensors and their products against torch and numpy, and the sentences of what is none."""

import doctest
from math import prod

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from trainledger.spec.problem import InvalidInput
from trainledger.tensors import einsum as einsum_module
from trainledger.tensors import number as number_module
from trainledger.tensors.einsum import Tensor, einsum, read_tensor
from trainledger.tensors.number import ALIASES, known_format

DTYPES = {
    "fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "int64": torch.int64,
    "e4m3": torch.float8_e4m3fn, "uint8": torch.uint8, "bool": torch.bool,
}  # fmt: skip


def test_examples():
    for each in (einsum_module, number_module):
        failed, tried = doctest.testmod(each)
        assert (failed, tried > 0) == (0, True)


@settings(max_examples=100)
@given(name=st.sampled_from(sorted(DTYPES)), shape=st.lists(st.integers(0, 7), max_size=5))
def test_bytes_and_strides_are_those_of_torch(name, shape):
    real, ours = torch.empty(shape, dtype=DTYPES[name]), Tensor(name, tuple(shape))
    assert (ours.nbytes, ours.elements, ours.strides) == (real.nbytes, real.numel(), real.stride())
    written = f"{real.dtype!s}[{','.join(map(str, shape))}]"
    assert read_tensor(written) == ours


def test_names_of_formats():
    for name, dtype in DTYPES.items():
        assert known_format(str(dtype)) == name
    assert all(known_format(each) for each in ALIASES)


SIZES = {"a": 2, "b": 3, "c": 5, "d": 7, "e": 11}
INDICES = st.lists(st.text("abcde", min_size=1, max_size=3).filter(lambda each: len(set(each)) == len(each)),
                   min_size=2, max_size=5)  # fmt: skip


@settings(max_examples=150)
@given(inputs=INDICES, data=st.data())
def test_no_order_costs_less_by_numpy(inputs, data):
    every = sorted(set("".join(inputs)))
    output = "".join(data.draw(st.lists(st.sampled_from(every), unique=True, max_size=3)))
    shapes = [tuple(SIZES[each] for each in indices) for indices in inputs]
    ours = einsum(f"{','.join(inputs)}->{output}", shapes)
    arrays = [np.empty(each) for each in shapes]
    path, _ = np.einsum_path(ours.equation, *arrays, optimize="optimal")
    assert ours.shape == tuple(SIZES[each] for each in output)
    assert len(ours.steps) == len(inputs) - 1
    assert ours.flops <= _cost_of(path[1:], inputs, output)


def _cost_of(path, inputs, output):
    """FLOPs of numpy's order, by the convention of here."""
    left, total = list(inputs), 0
    for pair in path:
        taken = [left.pop(at) for at in sorted(pair, reverse=True)]
        needed = {*output, *"".join(left)}
        inside = set("".join(taken))
        kept = "".join(sorted(inside & needed)) if left else output
        total += prod(SIZES[each] for each in inside) * (len(taken) - 1 + bool(inside - set(kept)))
        left.append(kept)
    return total


@pytest.mark.parametrize(("equation", "shapes"), [
    ("ij,jk->ik", [(8, 4), (4, 6)]), ("bij,bjk->bik", [(2, 3, 4), (2, 4, 5)]), ("bhqd,bhkd->bhqk", [(2, 3, 5, 4)] * 2),
    ("bmk,kn->bmn", [(32, 16, 32), (32, 2)]),
])  # fmt: skip
def test_flops_are_those_that_torch_counts(equation, shapes):
    with FlopCounterMode(display=False) as counter:
        result = torch.einsum(equation, *(torch.empty(each) for each in shapes))
    ours = einsum(equation, shapes)
    assert (ours.flops, ours.shape) == (counter.get_total_flops(), tuple(result.shape))


WORDS = {"a": "batch", "b": "seq_q", "c": "d_model", "d": "heads", "e": "d_ff"}


@settings(max_examples=100)
@given(inputs=INDICES, data=st.data())
def test_words_are_letters_by_other_names(inputs, data):
    every = sorted(set("".join(inputs)))
    output = "".join(data.draw(st.lists(st.sampled_from(every), unique=True, max_size=3)))
    shapes = [tuple(SIZES[each] for each in indices) for indices in inputs]
    letters = einsum(f"{','.join(inputs)}->{output}", shapes)

    def in_words(text):
        sides = [
            ", ".join(" ".join(WORDS[each] for each in one) for one in side.split(",")) for side in text.split("->")
        ]
        return " -> ".join(sides)

    words = einsum(in_words(letters.equation), shapes)
    found = [each.equation.split() for each in words.steps if each.equation != ",->"]
    assert found == [in_words(each.equation).split() for each in letters.steps if each.equation != ",->"]
    assert (words.flops, words.nbytes, words.shape, words.at_once_flops) == (
        letters.flops, letters.nbytes, letters.shape, letters.at_once_flops
    )  # fmt: skip
    assert {WORDS[name]: size for name, size in letters.sizes.items()} == words.sizes


@settings(max_examples=100)
@given(data=st.data(), rest=st.lists(st.integers(1, 3), max_size=2), inputs=INDICES.map(lambda each: each[:2]))
def test_an_ellipsis_is_that_of_torch(data, rest, inputs):
    every = sorted(set("".join(inputs)))
    output = "".join(data.draw(st.lists(st.sampled_from(every), unique=True, max_size=3)))
    places = [data.draw(st.sampled_from(["", "...", "..."])) for _ in inputs]
    pairs = list(zip(places, inputs, strict=True))
    shapes = [(*(rest if dots else ()), *(SIZES[each] for each in one)) for dots, one in pairs]
    left = ",".join(dots + one for dots, one in pairs)
    arrow = data.draw(st.sampled_from(["", f"->{output}", f"->...{output}" if any(places) else f"->{output}"]))
    real = torch.einsum(left + arrow, [torch.zeros(each) for each in shapes])
    assert einsum(left + arrow, shapes).shape == tuple(real.shape)


@settings(max_examples=100)
@given(indices=st.text("abc", max_size=3), data=st.data())
def test_one_operand_is_a_view_where_torch_makes_one(indices, data):
    output = "".join(data.draw(st.lists(st.sampled_from(sorted(set(indices)) or [""]), unique=True)))
    x = torch.zeros([SIZES[each] for each in indices])
    real = torch.einsum(f"{indices}->{output}", x)
    ours = einsum(f"{indices}->{output}", [tuple(x.shape)])
    assert ours.shape == tuple(real.shape)
    assert ours.view == (real.untyped_storage().data_ptr() == x.untyped_storage().data_ptr())


def test_elementwise_products_and_sums():
    assert einsum("ij,ij->ij", [(4, 8)] * 2).flops == 32  # a product of each element
    assert einsum("ij->i", [(4, 8)]).flops == 32  # an addition of each element
    assert einsum("ij->ji", [(4, 8)]).flops == 0  # no arithmetic
    assert einsum("ij,jk", [(2, 3), (3, 4)]).equation == "ij,jk->ik"
    assert einsum("i,->i", [(3,), ()]).flops == 3
    half = einsum("ij,jk->ik", [(4, 8), (8, 2)], "bf16")
    assert half.nbytes == 2 * (32 + 16 + 8)
    assert half.intensity == 128 / 112


@pytest.mark.parametrize(("equation", "shapes", "sentence"), [
    ("ij,jk->ik", [(4, 8)], "equation = 'ij,jk->ik': has 2 operands, but 1 shape given"),
    ("ij,jk->ik", [(4, 8), (7, 2)], "shape 2 = '7,2': has j = 7, and shape 1 has j = 8; nearest that works: 8,2"),
    ("ij->ijk", [(4, 8)], "has k in the result but in no operand; nearest that works: ij->ij"),
    ("ij->ii", [(4, 8)], "has i twice in the result; nearest that works: ij->i"),
    ("ij->i", [(4, 8, 2)], "shape 1 = '4,8,2': has 3 dims, and operand 1 of the equation has 2 (ij)"),
    ("i1->i", [(4, 8)], "is letters for indices, commas between operands and -> before the result"),
    ("ij->...i", [(4, 8)], "has an ellipsis in the result and in no operand"),
    ("...i...->i", [(4, 8)], "has two ellipses in one operand"),
    ("...i,...i->i", [(4, 8), (8,)], "an ellipsis of different numbers of dims in its operands; name them"),
    ("seq d_model, d_model d_ff -> seq d_ff", [(4, 8), (7, 2)], "has d_model = 7, and shape 1 has d_model = 8"),
    ("seq d_model -> seq d_ff", [(4, 8)], "has d_ff in the result but in no operand; nearest that works: seq d_model "
                                          "-> seq"),
    ("", [], "is letters for indices"),
    (",".join("abcdefghijk"), [(2,)] * 11, "has 11 operands, more than 10"),
])  # fmt: skip
def test_wrong_equations_are_sentences(equation, shapes, sentence):
    with pytest.raises(InvalidInput) as caught:
        einsum(equation, shapes)
    assert sentence in str(caught.value)


@pytest.mark.parametrize(("text", "sentence"), [
    ("float32", "must be a format and a shape in brackets; nearest that works: float32[4,8]"),
    ("float32 4 8", "must be a format and a shape in brackets; nearest that works: float32[4,8]"),
    ("blah", "must be a format and a shape in brackets; nearest that works: float32[4,8]"),
    ("float33[4]", "is not a known number format"),
    ("flaot32[4]", "nearest that works: float32"),
    ("fp32[4,a]", "has dims that are no whole numbers of elements; write it like 4,8 ('a' is none)"),
    ("fp32[4,-8]", "has a dim below 0; nearest that works: 4,8"),
    ("fp32[1e10,1e10]", "has more than 1e18 elements"),
    (f"fp32[{'1,' * 65}]", "has 65 dims; a tensor has at most 64"),
])  # fmt: skip
def test_wrong_tensors_are_sentences(text, sentence):
    with pytest.raises(InvalidInput) as caught:
        read_tensor(text)
    assert sentence in str(caught.value)

"""Patterns of einops against torch's reshape, permute and reductions by hand, and against einops if it is there."""

import doctest
from math import prod

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trainledger.spec.problem import InvalidInput
from trainledger.tensors import einops as einops_module
from trainledger.tensors.chain import chain
from trainledger.tensors.einops import REDUCTIONS, is_pattern, rearranged
from trainledger.tensors.einsum import read_tensor
from trainledger.tensors.strided import Strided


def test_examples():
    failed, tried = doctest.testmod(einops_module)
    assert (failed, tried > 0) == (0, True)


def described(x: torch.Tensor) -> Strided:
    return Strided("fp32", 4, tuple(x.shape), x.stride(), x.storage_offset(), x.untyped_storage().nbytes())


@st.composite
def groups_of(draw, names):
    """Names parted into groups, now and then with an empty one."""
    groups, left = [], list(names)
    while left:
        count = draw(st.integers(1, min(3, len(left))))
        groups.append(left[:count])
        left = left[count:]
        if draw(st.integers(0, 7)) == 0:
            groups.append([])
    return groups


def written(groups):
    return " ".join(each[0] if len(each) == 1 else f"({' '.join(each)})" if each else "1" for each in groups)


@st.composite
def patterns(draw):
    """A pattern, a tensor for it, sizes to give, what happens to names, and the parts to do it by hand."""
    names = [f"n{at}" for at in range(draw(st.integers(0, 5)))]
    sizes = {each: draw(st.integers(1, 4)) for each in names}
    left = draw(groups_of(names))
    function = draw(st.sampled_from(["rearrange", "reduce", "repeat"]))
    gone = draw(st.lists(st.sampled_from(names), unique=True)) if names and function == "reduce" else []
    come = [f"r{at}" for at in range(draw(st.integers(0, 2)))] if function == "repeat" else []
    sizes |= {each: draw(st.integers(1, 3)) for each in come}
    right = draw(groups_of(draw(st.permutations([*(each for each in names if each not in gone), *come]))))
    shape = [prod(sizes[each] for each in group) for group in left]
    order = draw(st.permutations(range(len(shape))))
    x = torch.arange(prod(shape), dtype=torch.float32).reshape([shape[each] for each in order])
    x = x.permute([order.index(each) for each in range(len(shape))])  # not always contiguous
    given = {name: sizes[name] for group in left for name in group[1:]} | {name: sizes[name] for name in come}
    return f"{written(left)} -> {written(right)}", x, given, function, (names, gone, left, right, sizes)


def by_hand(x, names, gone, left, right, sizes, reduction):
    after = [name for group in right for name in group]
    kept = [name for name in after if name in names]
    x = x.reshape([sizes[each] for each in names]).permute([names.index(each) for each in (*kept, *gone)])
    for _ in gone:
        x = {"max": torch.amax, "min": torch.amin, "sum": torch.sum}[reduction](x, -1)
    x = x.reshape([sizes[each] if each in names else 1 for each in after]).expand([sizes[each] for each in after])
    return x.reshape([prod(sizes[each] for each in group) for group in right])


def agree(ours, x, y):
    assert ours.result.shape == tuple(y.shape)
    assert ours.view == (y.untyped_storage()._cdata == x.untyped_storage()._cdata)
    assert ours.result.nbytes == y.nbytes
    steps = [step for step, size in zip(ours.result.stride, y.shape, strict=True) if size > 1]
    assert steps == [step for step, size in zip(y.stride(), y.shape, strict=True) if size > 1]


@settings(max_examples=250)
@given(drawn=patterns(), reduction=st.sampled_from(["max", "min", "sum"]))
def test_a_pattern_is_what_torch_makes_by_hand(drawn, reduction):
    pattern, x, given_sizes, function, parts = drawn
    ours = rearranged(described(x), pattern, given_sizes, function=function, reduction=reduction)
    y = by_hand(x, *parts, reduction)
    agree(ours, x, y)
    assert ours.flops == (x.numel() if parts[1] else 0)
    assert {name: ours.sizes[name] for name in parts[4]} == parts[4]
    assert ours.moved_nbytes == 0 if ours.view else ours.moved_nbytes >= y.nbytes


@settings(max_examples=250)
@given(drawn=patterns(), reduction=st.sampled_from(["max", "min", "sum", "mean"]))
def test_a_pattern_is_what_einops_makes(drawn, reduction):
    einops = pytest.importorskip("einops")
    pattern, x, given_sizes, function, _ = drawn
    more = (reduction,) if function == "reduce" else ()
    y = getattr(einops, function)(x, pattern, *more, **given_sizes)
    ours = rearranged(described(x), pattern, given_sizes, function=function, reduction=reduction)
    agree(ours, x, y)


def test_well_known_patterns():
    images = read_tensor("fp32[2,3,8,6]")

    def shape(pattern, **more):
        reduction = more.pop("reduction", "")
        one = rearranged(einops_start(images), pattern, more, reduction=reduction)
        return one.result.shape, one.view

    assert shape("b c h w -> b h w c") == ((2, 8, 6, 3), True)
    assert shape("b c (h h2) (w w2) -> b (c h2 w2) h w", h2=2, w2=2) == ((2, 12, 4, 3), False)
    assert shape("b c (h 2) (w 2) -> b c h w", reduction="max") == ((2, 3, 4, 3), False)
    assert shape("b c ... -> b (...) c") == ((2, 48, 3), True)
    assert shape("b ... -> b", reduction="mean") == ((2,), False)
    assert shape("b c h w -> b c h w 4") == ((2, 3, 8, 6, 4), True)
    assert shape("b c h w -> b c h (w 2)") == ((2, 3, 8, 12), False)
    assert shape("b c h w -> 1 (b c h w) 1") == ((1, 288, 1), True)


def einops_start(tensor):
    from trainledger.tensors.chain import start_of

    return start_of(tensor)


def test_a_reduction_changes_the_format_as_torch_does():
    for name, dtype in (("int32", torch.int32), ("bool", torch.bool), ("fp16", torch.float16)):
        x = torch.zeros(2, 3, dtype=dtype)
        for how in REDUCTIONS:
            by_torch = {"max": torch.amax, "min": torch.amin}.get(how, getattr(torch, how))
            try:
                y = by_torch(x, -1)
            except RuntimeError:  # the mean of whole numbers
                with pytest.raises(InvalidInput, match="torch takes it of floating-point numbers"):
                    rearranged(einops_start(read_tensor(f"{name}[2,3]")), "a b -> a", reduction=how)
                continue
            ours = rearranged(einops_start(read_tensor(f"{name}[2,3]")), "a b -> a", reduction=how).result
            assert (ours.dtype, ours.itemsize) == (
                {torch.float16: "fp16", torch.int64: "int64", torch.bool: "bool", torch.int32: "int32"}[y.dtype],
                y.element_size(),
            )


def test_patterns_are_steps_of_a_chain_too():
    chained = chain(read_tensor("fp32[2,64,10]"), [
        "transpose(1,2)", "rearrange('b t (h d) -> b h t d', h=8)", "reduce('b h t d -> b h', 'sum')",
        "repeat('b h -> b h n', n=3)", "repeat(1, 1, 2)",
    ])  # fmt: skip
    assert [(each.kind, each.result.shape) for each in chained.steps] == [
        ("view", (2, 10, 64)), ("view", (2, 8, 10, 8)), ("result", (2, 8)), ("view", (2, 8, 3)), ("copy", (2, 8, 6)),
    ]  # fmt: skip


@pytest.mark.parametrize(("operation", "sentence"), [
    ("rearrange('a b -> b a', c=2)", "step 1, rearrange('a b -> b a', c=2): c = 2 is a size of no dim in the pattern"),
    ("repeat('a b -> a b c')", "introduces c, whose size is not given; nearest that works: c=2"),
    ("reduce('a b -> a')", "removes b without saying how to reduce"),
    ("reduce('a b -> a', 'sum', 'max')", "takes a pattern and one reduction"),
    ("rearrange('a b')", "takes a pattern of einops in quotes; nearest that works: rearrange('a b -> b a')"),
    ("rearrange(2)", "takes a pattern of einops in quotes"),
    ("rearrange", "lacks pattern; it is rearrange(pattern, ...)"),
    ("rearrange('a b -> a')", "has b on one side of the -> only, and rearrange keeps all dims; nearest that works: "
                              "reduce"),
])  # fmt: skip
def test_wrong_patterns_in_a_chain_are_sentences(operation, sentence):
    assert sentence in str(chain(read_tensor("fp32[4,8]"), operation).failure)
    assert chain(read_tensor("fp32[4,8]"), "reduce('a b -> a', reduction='sum')").result.shape == (4,)


@pytest.mark.parametrize(("equation", "sizes", "reduction", "is_one"), [
    ("ij->ji", {}, None, False), ("ij,jk->ik", {}, None, False), ("b (h d) -> b h d", {}, None, True),
    ("b c -> b", {}, "mean", True), ("batch seq -> seq batch", {}, None, False), ("b d -> b d n", {"n": 2}, None, True),
    ("batch seq -> batch seq head", {}, None, True), ("h w -> h w 3", {}, None, True), ("i1", {}, None, False),
])  # fmt: skip
def test_what_is_a_pattern_and_what_a_product(equation, sizes, reduction, is_one):
    assert is_pattern(equation, [(2, 8)], sizes, reduction) is is_one


@pytest.mark.parametrize(("pattern", "sizes", "more", "sentence"), [
    ("b (h d) t -> b h t d", {}, {}, "splits dim 1 of 64 into h d; give the size of all but one; nearest that works: "
                                     "h=1"),
    ("b (h d) t -> b h t d", {"h": 7}, {}, "splits dim 1 by 7, and fp32[2, 64, 10] has 64 there; nearest that works: "
                                           "h=8"),
    ("b c t -> b t", {}, {}, "removes c without saying how to reduce (mean, sum, max, min, prod, any, "
                             "all)"),
    ("b c t -> b t", {}, {"function": "rearrange"}, "has c on one side of the -> only, and rearrange keeps all dims; "
                                                     "nearest that works: reduce"),
    ("b c t -> b c t n", {}, {}, "introduces n, whose size is not given; nearest that works: n=2"),
    ("b c t -> b c n", {}, {}, "has t only before and n only after the ->"),
    ("b c -> c b", {}, {}, "names 2 dims before the ->, and the tensor has 3"),
    ("b b t -> b t", {}, {}, "names b twice before the ->"),
    ("b c t -> c b t", {"x": 2}, {}, "x = 2: is a size of no dim in the pattern"),
    ("b c t -> c b t", {"c": 3}, {}, "c = 3: has c = 3 in dim 1, and fp32[2, 64, 10] has 64 there; nearest that "
                                     "works: 64"),
    ("b (c t -> c b t", {}, {}, "has a bracket that does not close"),
    ("b ((c) t -> c b t", {}, {}, "has a bracket that does not close, or one in another"),
    ("b c t", {}, {}, "names dims before and after one ->"),
    ("b c $ -> b c", {}, {}, "has '$', which is neither a name, a number, a bracket nor an ellipsis"),
    ("b c t -> b ... c t", {}, {}, "has an ellipsis after the -> and none before it"),
    ("... b ... -> b", {}, {}, "has two ellipses on one side"),
    ("(... b) c t -> b c t", {}, {}, "has an ellipsis in brackets before the ->"),
    ("b c t -> b c", {}, {"reduction": "men"}, "reduction = 'men': is none of mean, sum, max, min, prod, any, all; "
                                               "nearest that works: mean"),
    ("b c 0 -> b c", {}, {}, "has a dim of 0; sizes in a pattern begin at 1"),
    ("b c t -> b c t", {"b": 0}, {}, "b = 0: must be a whole number of elements above 0; nearest that works: 1"),
])  # fmt: skip
def test_wrong_patterns_are_sentences(pattern, sizes, more, sentence):
    with pytest.raises(InvalidInput) as caught:
        rearranged(einops_start(read_tensor("fp32[2,64,10]")), pattern, sizes, **more)
    assert sentence in str(caught.value)

"""Chains of operations against torch: strides, offset, contiguity, view or copy, and failure exactly where it fails."""

import contextlib
import doctest
import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trainledger.spec.problem import InvalidInput
from trainledger.tensors import chain as chain_module
from trainledger.tensors import strided
from trainledger.tensors.chain import OPERATIONS, Call, chain, places, read_chain, read_index
from trainledger.tensors.copies import ELEMENTWISE
from trainledger.tensors.einsum import read_tensor

DTYPES = {
    "fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "int64": torch.int64,
    "int32": torch.int32, "int16": torch.int16, "uint8": torch.uint8, "bool": torch.bool, "e4m3": torch.float8_e4m3fn,
}  # fmt: skip
WORDS = {
    **DTYPES, "float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16,
    "channels_last": torch.channels_last, "channels_last_3d": torch.channels_last_3d,
    "contiguous_format": torch.contiguous_format, "preserve_format": torch.preserve_format, "uint8": torch.uint8,
}  # fmt: skip


def test_examples():
    for each in (chain_module, strided):
        failed, tried = doctest.testmod(each)
        assert (failed, tried > 0) == (0, True)


ELSEWHERE = {"cpu", "cuda", "type", "rearrange", "reduce"}  # of einops in test_einops, the others in tests below


def by_torch(x, call):
    """One operation as torch does it."""
    if call.name == "[]":
        return x[tuple(call.args)]
    args = [WORDS.get(each, each) if isinstance(each, str) else each for each in call.args]
    named = {name: WORDS.get(each, each) if isinstance(each, str) else each for name, each in call.named}
    if call.name in ("chunk", "split"):
        return getattr(x, call.name)(*args[:2])[args[2] if len(args) > 2 else 0]
    if call.name == "slice":
        return torch.ops.aten.slice.Tensor(x, *args)
    if call.name == "index_select":
        return x.index_select(args[0], torch.tensor(args[1:], dtype=torch.int64))
    if call.name in ("T", "mT"):
        return getattr(x, call.name)
    if call.name in ("contiguous", "clone") and args:
        return getattr(x, call.name)(memory_format=args[0])
    if call.name == "to" and isinstance(args[0], torch.memory_format):
        return x.to(memory_format=args[0])
    if call.name in ("transpose", "swapaxes") and not args:
        return x.transpose(0, 1) if x.dim() == 2 else x.transpose()
    if call.name in ("view", "reshape") and not args:
        args = [-1]
    if call.name.rstrip("_") in ELEMENTWISE and ELEMENTWISE[call.name.rstrip("_")][1] and not args:
        args = [1]
    return getattr(x, call.name)(*args, **named)


@st.composite
def sizes_of(draw, elements):
    """A shape with so many elements, now and then with a -1 or one that does not fit."""
    sizes, left = [], elements
    for _ in range(draw(st.integers(0, 3))):
        divisors = [each for each in range(1, left + 1) if left % each == 0] if left else [0, 1, 2]
        sizes.append(draw(st.sampled_from(divisors)))
        left = left // sizes[-1] if sizes[-1] else 0
    sizes = draw(st.permutations([*sizes, left]))
    if draw(st.integers(0, 4)) == 0:
        sizes[draw(st.integers(0, len(sizes) - 1))] = draw(st.sampled_from([-1, -1, -2, 0, 1, 5]))
    return sizes


@st.composite
def operations(draw, x):
    """An operation that mostly has a result on ``x``."""
    dims = x.dim()
    dim = st.integers(-dims - (draw(st.integers(0, 9)) == 0), max(dims - 1, 0) + (draw(st.integers(0, 9)) == 0))
    near = st.integers(-6, 6)
    small = st.integers(0, 4)
    often = ["[]", "view", "view", "reshape", "transpose", "permute", "contiguous"]
    name = draw(st.sampled_from([*sorted(set(OPERATIONS) - ELSEWHERE), *often]))
    plain = name.rstrip("_")
    if plain in ELEMENTWISE:
        return Call(name, tuple(draw(st.lists(st.sampled_from([1, 2, 1.5]), max_size=int(ELEMENTWISE[plain][1])))))
    if name in ("t", "T", "mT", "ravel", "detach", "half", "float", "double", "bfloat16", "long", "int", "short",
                "byte", "bool"):  # fmt: skip
        return Call(name)
    if name in ("view", "reshape"):
        if name == "view" and draw(st.integers(0, 3)) == 0:
            return Call(name, (draw(st.sampled_from(["float16", "fp32", "uint8", "int64", "bool"])),))
        return Call(name, tuple(draw(sizes_of(x.numel()))))
    if name in ("transpose", "swapaxes", "swapdims", "movedim", "moveaxis"):
        return Call(name, (draw(dim), draw(dim)))
    if name == "permute":
        order = draw(st.permutations(range(dims)))
        return Call(name, (tuple(order[: dims - (draw(st.integers(0, 9)) == 0)]),))
    if name == "squeeze":
        return Call(name, tuple(draw(st.lists(dim, max_size=1))))
    if name == "unsqueeze":
        return Call(name, (draw(st.integers(-dims - 2, dims + 1)),))
    if name in ("expand", "broadcast_to"):
        sizes = [draw(small) if size == 1 else draw(st.sampled_from([size, size, size, -1])) for size in x.shape]
        return Call(name, ((*draw(st.lists(small, max_size=2)), *sizes),))
    if name in ("repeat", "tile"):
        return Call(name, (tuple(draw(st.lists(st.integers(0, 2), min_size=max(dims - 1, 0), max_size=dims + 1))),))
    if name == "flatten":
        return Call(name, tuple(draw(st.lists(dim, max_size=2))))
    if name == "unflatten":
        at = draw(dim)
        return Call(name, (at, tuple(draw(sizes_of(x.shape[at] if -dims <= at < dims else 2)))))
    if name == "[]":
        one = st.one_of(near, st.none(), st.just(Ellipsis), st.builds(slice, near, near, st.integers(0, 3)),
                        st.just(slice(None)), st.integers(0, 1))  # fmt: skip
        items = draw(st.lists(one, min_size=1, max_size=dims + 1).filter(lambda each: each.count(Ellipsis) < 2))
        return Call(name, tuple(items))
    if name == "slice":
        return Call(name, (draw(dim), draw(st.none() | near), draw(st.none() | near), draw(small)))
    if name == "select":
        return Call(name, (draw(dim), draw(near)))
    if name == "narrow":
        return Call(name, (draw(dim), draw(near), draw(small)))
    if name in ("chunk", "split"):
        return Call(name, (draw(small), draw(dim), draw(st.integers(0, 2))))
    if name == "unfold":
        return Call(name, (draw(dim), draw(small), draw(small)))
    if name == "diagonal":
        return Call(name, (draw(st.integers(-2, 2)), draw(dim), draw(dim)))
    if name == "as_strided":
        shape = draw(st.lists(st.integers(0, 3), max_size=3))
        stride = draw(st.lists(st.integers(0, 4), min_size=len(shape), max_size=len(shape)))
        return Call(name, (tuple(shape), tuple(stride), *draw(st.lists(small, max_size=1))))
    if name in ("contiguous", "clone"):
        orders = st.sampled_from(["channels_last", "channels_last_3d", "contiguous_format"])
        return Call(name, tuple(draw(st.lists(orders, max_size=1))))
    if name == "to":
        return Call(name, (draw(st.sampled_from(["bf16", "fp32", "int64", "channels_last", "contiguous_format"])),))
    if name == "repeat_interleave":
        return Call(name, (draw(st.integers(0, 2)), *draw(st.lists(dim, max_size=1))))
    if name == "flip":
        return Call(name, (tuple(draw(st.lists(dim, unique=True, max_size=2))),))
    assert name == "index_select", name
    return Call(name, (draw(dim), *draw(st.lists(st.integers(0, 2), max_size=3))))


@settings(max_examples=600)
@given(data=st.data(), name=st.sampled_from(sorted(DTYPES)), length=st.integers(1, 5),
       shape=st.lists(st.sampled_from([1, 2, 3, 4, 0, 6, 2, 1]), max_size=4))  # fmt: skip
def test_every_step_is_what_torch_makes(data, name, length, shape):
    x = torch.zeros(shape, dtype=DTYPES[name])
    start = read_tensor(f"{name}[{','.join(map(str, shape))}]")
    calls: list[Call] = []
    for _ in range(length):
        call = data.draw(operations(x), label="call")
        calls.append(call)
        text = [each.text for each in calls]
        assert read_chain(text) == tuple(calls)
        ours = chain(start, text)
        y, error = tried(x, call)
        if "flip_cpu" in error:
            return  # the CPU has no such kernel for fp8; strides say nothing about it
        assert (ours.failure is None) == (y is not None), f"torch: {error or (y.shape, y.stride())}; ours: {ours}"
        if y is None:
            return
        agree(ours, x, y)
        x = y


def tried(x, call):
    """What torch makes, or None and its error."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return by_torch(x, call), ""
    except (RuntimeError, IndexError, TypeError, ValueError, NotImplementedError) as error:
        return None, str(error) or "an error"


def agree(ours, x, y):
    """The last step's result and kind are those of torch, which made ``y`` of ``x``."""
    one, step = ours.result, ours.steps[-1]
    assert one.shape == tuple(y.shape), ours
    assert one.stride == y.stride(), ours
    assert DTYPES[one.dtype] == y.dtype, ours
    assert (one.offset, one.itemsize) == (y.storage_offset(), y.element_size()), ours
    shares = y.untyped_storage()._cdata == x.untyped_storage()._cdata
    assert step.shares == shares, ours
    assert one.storage_nbytes == y.untyped_storage().nbytes(), ours
    assert step.written_nbytes == (0 if shares and step.kind != "in place" else y.nbytes), ours
    if step.kind in ("same", "in place"):
        assert y is x or step.kind == "same"
    assert one.contiguous == y.is_contiguous(), ours
    for order, dims in (("channels_last", 4), ("channels_last_3d", 5)):
        if y.dim() == dims:
            assert one.in_format(order) == y.is_contiguous(memory_format=WORDS[order]), ours
    assert one.dense == torch.ops.aten.is_non_overlapping_and_dense(y) or not y.numel()
    if y.numel():
        index = tuple(size // 2 for size in y.shape)
        assert one.byte(index) == y[index].data_ptr() - y.untyped_storage().data_ptr()


def test_the_example_of_the_issue():
    chained = chain(read_tensor("float32[4,8]"), ["transpose", "view"])
    assert [(each.kind, each.result.stride) for each in chained.steps] == [("view", (1, 8))]
    assert str(chained.failure) == (
        "step 2, view: fp32[8, 4] with strides [1, 8] cannot be viewed as [32]: dims 0 and 1 would be merged into one, "
        "for which dim 0 would need stride 32, and it has stride 1; "
        "nearest that works: reshape(32), a copy of 128 bytes"
    )
    assert "view fails: step 2, view: fp32[8, 4]" in repr(chained)


@pytest.mark.parametrize("operations", [
    ["transpose(0,1)", "reshape(32)", "view(2,16)"], "transpose(0, 1) reshape(32) view(2, 16)",
    ".transpose(0,1).reshape(32).view(2,16)", ["transpose:0,1", "reshape:32", "view:2,16"],
    ["transpose(dim0=0, dim1=1)", "reshape((32,))", "view([2,16])"], ["t", "reshape", "view(2,-1)"],
])  # fmt: skip
def test_ways_to_write_the_same(operations):
    chained = chain(read_tensor("float32[4,8]"), operations)
    assert [(each.result.shape, each.kind, each.written_nbytes) for each in chained.steps] == [
        ((8, 4), "view", 0), ((32,), "copy", 128), ((2, 16), "view", 0)
    ]  # fmt: skip
    assert (chained.written_nbytes, chained.shares) == (128, False)


@pytest.mark.parametrize(("named", "plain"), [
    ("permute(dims=(1,0))", "permute(1,0)"), ("squeeze(dim=0)", "squeeze(0)"), ("view(size=(8,4))", "view(8,4)"),
    ("reshape(shape=[-1])", "reshape(-1)"), ("flip(dims=(0,))", "flip(0)"), ("repeat(repeats=(2,2))", "repeat(2,2)"),
    ("unflatten(dim=1, sizes=(2,4))", "unflatten(1,2,4)"), ("unflatten(1, sizes=(2,4))", "unflatten(1,2,4)"),
    ("unfold(dimension=1, size=2, step=2)", "unfold(1,2,2)"), ("to(dtype=torch.float16)", "half"),
    ("t.to(memory_format=torch.contiguous_format)", "t.to(contiguous_format)"), ("to(device=cuda)", "cuda"),
    ("expand(size=(2,-1,-1))", "expand(2,-1,-1)"), ("narrow(dim=0,start=1,length=2)", "[1:3]"),
    ("flatten(start_dim=1)", "flatten(1)"), ("transpose(dim0=1,dim1=0)", "T"),
    ("to('cuda', bfloat16)", "to(bf16, cuda)"),
    ("index_select(0, index=(0,1))", "index_select(0,0,1)"),
])  # fmt: skip
def test_names_of_arguments_are_those_of_torch(named, plain):
    one, other = (chain(read_tensor("float32[4,8]"), each) for each in (named, plain))
    assert one.failure is None, one.failure
    assert one.result == other.result


@pytest.mark.parametrize(("tensor", "operations", "sentence"), [
    ("fp32[4,8]", "view(5,8)", "asks for 40 elements, and fp32[4, 8] has 32; nearest that works: [5, 32]|[4, 8]"),
    ("fp32[4,8]", "view(-1,5)", "cannot split 32 elements into pieces of 5"),
    ("fp32[4,8]", "view(-1,-1)", "can infer only one size, and two are -1"),
    ("fp32[4,8]", "transpose(0,2)", "has no dim 2: of fp32[4, 8] they are 0 to 1, or -2 to -1 from the end; "
                                    "nearest that works: 1"),
    ("fp32[4,8,2]", "transpose", "needs the two dims to swap, unless there are exactly two; nearest that works: "
                                 "transpose(-2, -1)"),
    ("fp32[4,8,2]", "t", "transposes at most two dims, and fp32[4, 8, 2] has 3; nearest that works: mT, or permute"),
    ("fp32[4,8]", "permute(1)", "names 1 dims, and fp32[4, 8] has 2; nearest that works: [1, 0]"),
    ("fp32[4,8]", "permute(1,1)", "names dim 1 twice"),
    ("fp32[4,8]", "expand(8,8)", "expands only dims of size 1, and dim 0 of fp32[4, 8] has 4; nearest that works: "
                                 "[4, 8]"),
    ("fp32[4,8]", "[::-1]", "has a step of -1, and torch's slices step forward; nearest that works: flip(0), a copy of "
                            "128 bytes"),
    ("fp32[4,8]", "[:,[0,2]]", "has a list of indices, whose elements are copied; nearest that works: "
                               "index_select(1, 0, 2)"),
    ("fp32[4,8]", "[4]", "asks for index 4 of dim 0, which has 4; nearest that works: 3"),
    ("fp32[4,8]", "[0,0,0]", "has 3 indices, and fp32[4, 8] has 2 dims"),
    ("fp32[4,8]", "t view(float16)", "needs a last dim of stride 1 to read elements of 4 bytes as 2, and it "
                                     "has stride 8; nearest that works: contiguous() before it, a copy of 128 bytes"),
    ("fp16[4,7]", "view(float32)", "needs a last dim that 2 divides to read 2 elements as one, and it is 7"),
    ("fp32[4,1]", "expand(4,8) add_(1)", "would write one element of the storage under several indices; nearest that "
                                         "works: clone(), a copy of 128 bytes"),
    ("fp32[4,1]", "expand(4,8) view(32)",
     "dim 1 of fp32[4, 8] has stride 0, so that each element of it is the same one"),
    ("int64[4]", "exp_", "gives fp32, which has no room in int64; nearest that works: exp"),
    ("e4m3[4]", "add(1)", "is not among torch's operations on e4m3; nearest that works: to(bfloat16) before it"),
    ("fp32[4,8]", "as_strided((8,8),(8,1))", "would reach element 63 of a storage that holds 32"),
    ("fp32[4,8]", "chunk(2,0,2)", "makes 2 pieces, and piece 2 is none of them; nearest that works: 1"),
    ("fp32[4,8]", "narrow(0,2,3)", "asks for 3 from 2 on of dim 0, which has 4; nearest that works: narrow(0, 2, 2)"),
    ("fp32[4,8]", "flatten(1,0)", "begins at dim 1, after its end at dim 0; nearest that works: flatten(0, 1)"),
    ("fp32[4,8]", "contiguous(channels_last)", "channels_last is an order of 4 dims, and fp32[4, 8] has 2"),
    ("fp32[4,8]", "to(nvfp4)", "an element of nvfp4 has no address"),
    ("fp32[4,8]", "to(5)", "takes a dtype, a device or a memory format, not 5"),
    ("fp32[4,8]", "transpose(a=0)", "has no argument a; it is transpose(dim0, dim1)"),
    ("fp32[4,8]", "unsqueeze", "lacks dim; it is unsqueeze(dim)"),
    ("fp32[4,8]", "unsqueeze(0,dim=1)", "has one argument twice; it is unsqueeze(dim)"),
    ("fp32[4,8]", "select(0,1,2)", "takes 2 arguments at most, and 3 are given; it is select(dim, index)"),
    ("fp32[4,8]", "repeat(10000000000,10000000000)", "makes more than 1e18 elements"),
])  # fmt: skip
def test_failures_are_sentences_and_the_steps_before_stay(tensor, operations, sentence):
    chained = chain(read_tensor(tensor), operations)
    assert chained.failure is not None
    assert any(each in str(chained.failure) for each in sentence.split("|")), chained.failure
    assert len(chained.steps) == len(read_chain(operations)) - 1


@pytest.mark.parametrize(("operations", "sentence"), [
    ("transposee", "operations = 'transposee': is no operation that is known here ("),
    ("transposee", "nearest that works: transpose"),
    ("view(4,", "operations = 'view(4,': is no operation such as transpose(0,1), view(4,8), contiguous or [:,1]; "
                "nearest that works: view"),
    ("view(print())", "is no operation such as"), ("view(lambda: 0)", "is no operation such as"),
    ("+1", "is no operation such as"), ("view(*x)", "is no operation such as"), ("[f(1)]", "is no operation such as"),
    ("(" * 500, "is no operation such as"), ("t " * 101, "has 101 operations; 100 are shown at most"),
    ("t" * 2001, "is longer than 2,000 characters"), ("view(**{})", "is no operation such as"),
])  # fmt: skip
def test_text_that_is_no_chain_is_a_sentence(operations, sentence):
    with pytest.raises(InvalidInput) as caught:
        chain(read_tensor("fp32[4,8]"), operations)
    assert sentence in str(caught.value)


@settings(max_examples=300)
@given(text=st.text("tview()[]:,.-0123456789 ~'\"\\=*ab\0é", max_size=20) | st.text(max_size=12))
def test_any_text_is_a_chain_or_a_sentence(text):
    with warnings.catch_warnings(), contextlib.suppress(InvalidInput):
        warnings.simplefilter("error")
        assert repr(chain(read_tensor("fp32[4,8]"), text)).startswith("fp32[4, 8], stride [8, 1], offset 0")


def test_formats_that_share_bytes_have_no_addresses():
    with pytest.raises(InvalidInput) as caught:
        chain(read_tensor("nvfp4[4,8]"), "t")
    assert "packs its elements or keeps separate scales" in str(caught.value)


def test_devices():
    chained = chain(read_tensor("fp32[4,8]"), "cpu cuda to(cuda) to(cuda,bf16) cpu")
    assert [(each.kind, each.result.device, each.written_nbytes) for each in chained.steps] == [
        ("same", "", 0), ("copy", "cuda", 128), ("same", "cuda", 0), ("copy", "cuda", 64), ("copy", "cpu", 64)
    ]  # fmt: skip


def test_the_element_of_an_index():
    chained = chain(read_tensor("bf16[4,8]"), "transpose [2:] contiguous flatten")
    assert places(chained, read_index("1,2")) == [10, 17, 19, 6, None]
    assert places(chained, read_index("-1,-1")) == [31, 31, 31, 23, None]
    assert chained.steps[0].result.byte((1, 2)) == 34
    with pytest.raises(InvalidInput, match=r"--at = '4,8': bf16\[4, 8\] has 4 in dim 0, and the index asks for 4; "
                                           "nearest that works: 3,7"):  # fmt: skip
        places(chain(read_tensor("bf16[4,8]"), ""), (4, 8))
    with pytest.raises(InvalidInput, match="is no index; write it like 1,2"):
        read_index("1,x")


@settings(max_examples=100)
@given(shape=st.lists(st.integers(1, 4), min_size=1, max_size=3), data=st.data())
def test_a_drawing_says_the_place_of_every_element(shape, data):
    order = data.draw(st.permutations(range(len(shape))))
    x = torch.arange(torch.Size(shape).numel()).reshape(shape).permute(order)
    drawn = chain(read_tensor(f"int64[{','.join(map(str, shape))}]"), [f"permute{tuple(order)}"]).result.drawing()
    boxes, _, grid = drawn.partition("the tensor, each element by its index in the storage\n")
    lines = [line for line in grid.splitlines() if not line.startswith("[")]
    assert [int(each) for line in lines for each in line.split()] == x.flatten().tolist()
    inside = [
        each.strip() for line in boxes.splitlines() if line.startswith("|") for each in line.strip("|").split("|")
    ]
    where = x.flatten().argsort()
    assert [int(each) for each in inside] == where.tolist()
    assert max(map(len, drawn.splitlines())) <= 80


def test_what_is_too_large_or_empty_is_not_drawn():
    assert chain(read_tensor("fp32[100,8]"), "").result.drawing() == (
        "no drawing: the storage holds 800 elements, and 64 are drawn at most"
    )
    assert chain(read_tensor("fp32[0,8]"), "").result.drawing() == "no drawing: the tensor has no elements"
    several = chain(read_tensor("fp32[2,1]"), "expand(2,5)").result.drawing()
    assert "| 0..4 | 5..9 |" in several

"""`tl.inspect` against what torch says of tensors: real, fake, on meta, and of those that are made of others."""

import doctest
import importlib
import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

import trainledger as tl
from trainledger.spec.problem import InvalidInput
from trainledger.tensors.chain import chain, start_of
from trainledger.tensors.einsum import read_tensor
from trainledger.tensors.strided import Chain, Strided

inspect_module = importlib.import_module("trainledger.tensors.inspect")
Composite = inspect_module.Composite


def test_examples():
    failed, tried = doctest.testmod(inspect_module)
    assert (failed, tried > 0) == (0, True)


@settings(max_examples=100)
@given(shape=st.lists(st.integers(0, 4), max_size=4), data=st.data(),
       dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.complex64, torch.bool]))  # fmt: skip
def test_the_facts_are_those_of_torch(shape, data, dtype):
    x = torch.zeros(shape, dtype=dtype).permute(data.draw(st.permutations(range(len(shape)))))
    if x.dim():
        x = x[data.draw(st.integers(0, 2)) :]
    one = tl.inspect(x)
    assert isinstance(one, Strided)
    assert (one.shape, one.stride, one.offset) == (tuple(x.shape), x.stride(), x.storage_offset())
    assert (one.nbytes, one.itemsize, one.elements) == (x.nbytes, x.element_size(), x.numel())
    assert (one.storage_nbytes, one.contiguous) == (x.untyped_storage().nbytes(), x.is_contiguous())
    if x.numel():
        index = [data.draw(st.integers(-size, size - 1)) for size in x.shape]
        assert one.address_of(index) == x[tuple(index)].data_ptr()
    fake = FakeTensorMode().from_tensor(x)
    pretended = tl.inspect(fake)
    assert (pretended.shape, pretended.stride, pretended.offset) == (one.shape, one.stride, one.offset)
    assert pretended.address is None
    assert pretended.address_of([0] * x.dim()) is None if x.numel() else True


def test_one_vocabulary_with_the_verb():
    x = torch.zeros(4, 8)
    real = tl.inspect(x, x.t(), x.t()[2:], x.t()[2:].contiguous())
    chained = chain(read_tensor("fp32[4,8]"), "t [2:] contiguous")
    assert isinstance(real, Chain)
    layout = ("dtype", "shape", "stride", "offset", "storage", "storage_nbytes", "itemsize")
    for one, other in zip(real.steps, chained.steps, strict=True):
        assert [getattr(one.result, each) for each in layout] == [getattr(other.result, each) for each in layout]
        assert (one.kind, one.written_nbytes, one.shares) == (other.kind, other.written_nbytes, other.shares)
    assert real.start.drawing() == start_of(read_tensor("fp32[4,8]")).drawing()


def test_what_it_prints():
    x = torch.zeros(4, 8, requires_grad=True)
    lines = repr(tl.inspect(x[1:].t())).splitlines()
    assert lines[0] == "fp32[8, 3]"
    for each in (
        "  stride         [1, 8] elements, [4, 32] bytes", "  offset         8 elements",
        "  storage        128 bytes, of which this tensor reaches 96", "  requires grad  yes", "  device         cpu",
        "  contiguous     no: without gaps, in the order of dims 1, 0", "  view of        fp32[4, 8]",
        "  grad_fn        TBackward0", "  leaf           no",
        "  grad           none: kept of leaves alone, or after retain_grad()",
    ):  # fmt: skip
        assert each in lines
    address = next(each for each in lines if each.startswith("  address"))
    assert f"{x.data_ptr() + 32:#x}, of the storage {x.data_ptr():#x}" in address


def test_what_autograd_knows():
    x, w = torch.ones(2, 3), torch.zeros(3, 5, dtype=torch.bfloat16, requires_grad=True)
    h = x.bfloat16() @ w
    h.retain_grad()
    y = h * 2
    before = [tl.inspect(each) for each in (x, w, h, y)]
    assert [(one.requires_grad, one.is_leaf, one.grad, one.grad_fn) for one in before] == [
        (False, True, None, None), (True, True, None, None), (True, False, None, "MmBackward0"),
        (True, False, None, "MulBackward0"),
    ]  # fmt: skip
    y.sum().backward()
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # torch warns where .grad of what is no leaf is read
        assert [tl.inspect(each).grad for each in (x, w, h, y)] == [None, "bf16[3, 5]", "bf16[2, 5]", None]
    words = [dict(one.facts()) for one in before]
    assert [each["grad"][:12] for each in words] == ["none: it wan", "none yet", "none: kept o", "none: kept o"]
    assert dict(tl.inspect(w).facts())["grad"] == "bf16[3, 5]"


@pytest.mark.parametrize(("x", "contiguity"), [
    (torch.zeros(2, 3), "yes"), (torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last), "no: channels_last"),
    (torch.zeros(2, 1).expand(2, 5), "no: several indices are one element"),
    (torch.zeros(4, 6)[:, ::2], "no: between its elements lie others, or some are in it twice"),
])  # fmt: skip
def test_contiguity_in_words(x, contiguity):
    assert tl.inspect(x).contiguity == contiguity


def test_views_copies_and_results_of_several_tensors():
    x = torch.randn(4, 8, requires_grad=True)
    y = x.t()
    found = tl.inspect(x, x, y, y.contiguous(), x @ y, x[:1])
    assert [(each.kind, each.written_nbytes) for each in found.steps] == [
        ("same", 0), ("view", 0), ("copy", 128), ("result", 64), ("view", 0)
    ]  # fmt: skip
    assert "written by Clone" in found.steps[2].why
    assert "written by Mm" in found.steps[3].why
    assert found.steps[4].why == "over the storage of tensor 3, in a part that meets it over 32 bytes"
    parts = tl.inspect(x[:2], x[2:], x[1:3])
    assert parts.steps[0].why == "over the same storage, in another part of it"
    assert parts.steps[1].why == "over the same storage, in a part that meets it over 32 bytes"
    assert tl.inspect(x, x.view(8, 4)).steps[0].why == "over the same storage, in the same part of it"


def test_meta_fake_and_symbolic():
    assert "on meta: sizes and strides without memory, so no address" in tl.inspect(torch.zeros(3, device="meta")).notes
    meta = torch.zeros(4, 8, device="meta")
    assert [each.kind for each in tl.inspect(meta, meta.t(), meta.t().contiguous()).steps] == ["view", "copy"]
    with FakeTensorMode() as mode:
        x = torch.zeros(4, 8)
        assert [each.kind for each in tl.inspect(x, x.t(), x.t().contiguous()).steps] == ["view", "copy"]
    mode = FakeTensorMode(shape_env=ShapeEnv())
    context = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC, DimDynamic.DYNAMIC])
    one = tl.inspect(mode.from_tensor(torch.zeros(5, 6), symbolic_context=context))
    assert (one.shape, one.stride, one.storage_nbytes) == ((5, 6), (6, 1), 120)
    assert any(each.endswith(" is 5 here") for each in one.notes)
    assert not mode.shape_env.guards


def test_released_memory_and_parameters():
    x = torch.zeros(1000)
    x.untyped_storage().resize_(0)
    one = tl.inspect(x)
    assert one.storage_nbytes == 0
    assert "the storage is shorter than the tensor reaches: its memory was released, as FSDP does" in one.notes
    assert "a Parameter" in tl.inspect(torch.nn.Parameter(torch.zeros(2))).notes
    conjugated = tl.inspect(torch.zeros(2, dtype=torch.complex64).conj())
    assert "read with another sign: conjugated or negated only when used" in conjugated.notes


def test_sparse_and_nested_tensors_are_their_parts():
    coo = tl.inspect(torch.eye(4).to_sparse())
    assert isinstance(coo, Composite)
    assert [(name, each.shape, each.dtype) for name, each in coo.parts] == [
        ("indices", (2, 4), "int64"), ("values", (4,), "fp32")
    ]  # fmt: skip
    assert (coo.nbytes, coo.shape) == (80, (4, 4))
    assert "4 of 16 elements are held" in repr(coo)
    for layout, names in (("csr", ["crow_indices", "col_indices"]), ("csc", ["ccol_indices", "row_indices"])):
        compressed = tl.inspect(getattr(torch.eye(4), f"to_sparse_{layout}")())
        assert [name for name, _ in compressed.parts] == [*names, "values"]
        assert layout.upper() in repr(compressed)
    rows = [torch.zeros(2, 3), torch.zeros(4, 3)]
    for layout in (torch.strided, torch.jagged):
        nested = tl.inspect(torch.nested.nested_tensor(rows, layout=layout))
        assert nested.shape == (2, "ragged", 3)
        assert sum(each.elements for _, each in nested.parts if each.dtype == "fp32") == 18
    with pytest.raises(tl.InvalidInput, match=r"tensor 1: is sparse \(COO\) and lies in several storages; inspect its "
                                              r"parts \(indices, values\) one by one"):  # fmt: skip
        tl.inspect(torch.eye(4).to_sparse(), torch.eye(4))


@pytest.mark.parametrize(("what", "sentence"), [
    ([1, 2], r"tensor = '\[1, 2\]': must be a tensor of torch; nearest that works: torch.as_tensor\(x\)"),
    (torch.zeros(2).numpy(), r"nearest that works: torch.from_numpy\(x\)"),
    (torch.nn.Linear(2, 2), "must be a tensor of torch; nearest that works: one of its parameters"),
    (torch.zeros(3, 3).to_mkldnn(), "a Tensor of layout torch._mkldnn whose strides and storage are unknown"),
])  # fmt: skip
def test_what_cannot_be_inspected_is_a_sentence(what, sentence):
    with pytest.raises(tl.InvalidInput, match=sentence):
        tl.inspect(what)


def test_inside_vmap_it_is_a_sentence():
    said = []

    def look(x):
        with pytest.raises(tl.InvalidInput) as caught:
            tl.inspect(x)
        said.append(str(caught.value))
        return x

    torch.vmap(look)(torch.zeros(3, 2))
    assert "whose strides and storage are unknown" in said[0]


def test_a_distributed_tensor_is_what_this_rank_holds():
    import torch.distributed as dist
    from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    try:
        one = tl.inspect(distribute_tensor(torch.zeros(8, 8), init_device_mesh("cpu", (4,)), [Shard(0)]))
    finally:
        dist.destroy_process_group()
    assert (one.what, one.shape, one.nbytes) == ("DTensor", (8, 8), 64)
    assert [(name, part.shape) for name, part in one.parts] == [("_local_tensor", (2, 8))]
    assert "on a mesh of 4; what this rank holds:" in repr(one)


def test_a_parameter_that_has_no_shape_yet():
    lazy = torch.nn.LazyLinear(8)
    for each in (lazy.weight, lazy.bias, torch.nn.parameter.UninitializedBuffer()):
        with pytest.raises(InvalidInput, match=f"a {type(each).__name__} has no shape before the first forward"):
            tl.inspect(each)
    lazy(torch.zeros(2, 4))
    assert tl.inspect(lazy.weight).shape == (8, 4)

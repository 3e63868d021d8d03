"""A world of any number of ranks of which one runs: nothing is sent, nothing is computed."""

from __future__ import annotations

import gc
import os
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import schedules
from torch.distributed.pipelining import stage as stages

from trainledger.spec.frozen import frozen
from trainledger.spec.problem import InvalidInput, Problem
from trainledger.trace.distributed.collectives import AXES, SHARDS, name_groups
from trainledger.trace.distributed.reducer import REDUCER
from trainledger.trace.fakes.accelerator import as_cpu
from trainledger.trace.fakes.gpu import Gpu
from trainledger.trace.fakes.values import ZeroWhereUnknown
from trainledger.trace.patches import Patch, all_replaced, answering, around, inside, names, replaced

RANKS_PER_HOST = 8  # what LOCAL_WORLD_SIZE says, of which some programs derive a mesh


@frozen
class World:
    """Where a rank runs: its place, how many ranks there are, the mode of its fake tensors, and the GPU it hears of."""

    world_size: int
    rank: int
    mode: FakeTensorMode
    gpu: Gpu


@contextmanager
def fake_world(world_size: int, rank: int = 0) -> Iterator[World]:
    """A context in which code runs as rank ``rank`` of ``world_size``: collectives do nothing, and tensors are fake.

    A program for torchrun runs as it is: ``init_process_group`` with any backend, ``init_device_mesh("cuda", ...)``,
    ``fully_shard``, ``parallelize_module``, ``DistributedDataParallel``, pipeline stages. RANK, WORLD_SIZE,
    LOCAL_RANK and LOCAL_WORLD_SIZE are set as torchrun sets them, with hosts of 8 ranks. What is on ``cuda`` is on the
    CPU instead, as a build without CUDA has no such tensors. Values read off tensors are 0. Raises `InvalidInput` for a
    rank that is not in the world, or where a process group is there already.
    """
    with entered(world_size, rank) as world, ZeroWhereUnknown():
        yield world


@contextmanager
def entered(world_size: int, rank: int) -> Iterator[World]:
    """`fake_world` without values: reading one off a tensor fails."""
    _check(world_size, rank)
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    per_host = min(RANKS_PER_HOST, world_size)
    gpu = Gpu(per_host, rank % per_host)
    with (
        _little_to_collect(),
        _environment(world_size, rank),
        process_groups(world_size, rank),
        replaced(torch.utils, "swap_tensors", around(partial(_swap, mode))),
        as_cpu(gpu),
        mode,
    ):
        yield World(world_size, rank, mode, gpu)


@contextmanager
def process_groups(world_size: int, rank: int) -> Iterator[None]:
    """Inside, process groups and what is built on them (meshes, FSDP2, DDP, pipeline stages) send nothing."""
    with _fake_process_groups(world_size, rank), all_replaced(*_MESHES, *SHARDS, *_STAGES, *REDUCER):
        yield


@contextmanager
def _little_to_collect() -> Iterator[None]:
    # The collector visits only what the world makes, not all modules each time. Where something is frozen already it
    # stays so, as objects frozen here and elsewhere cannot be distinguished.
    if gc.get_freeze_count():
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _check(world_size: int, rank: int) -> None:
    problems = []
    if not isinstance(world_size, int) or world_size < 1:
        problems.append(Problem("world_size", world_size, "is not a number of ranks", 1))
    elif not isinstance(rank, int) or not 0 <= rank < world_size:
        problems.append(
            Problem("rank", rank, f"is not a rank of {world_size}, which are counted from 0", world_size - 1)
        )
    if not dist.is_available():
        problems.append(Problem("world_size", world_size, "needs a torch that is built with torch.distributed"))
    elif dist.is_initialized():
        rule = "needs a process in which no process group is there yet; leave it before with destroy_process_group()"
        problems.append(Problem("world_size", world_size, rule))
    if problems:
        raise InvalidInput(problems)


@contextmanager
def _environment(world_size: int, rank: int) -> Iterator[None]:
    """The variables that torchrun sets."""
    per_host = min(RANKS_PER_HOST, world_size)
    variables = {"RANK": rank, "WORLD_SIZE": world_size, "LOCAL_RANK": rank % per_host, "LOCAL_WORLD_SIZE": per_host}
    variables |= {"GROUP_RANK": rank // per_host, "MASTER_PORT": 29500}
    before = {name: os.environ.get(name) for name in (*variables, "MASTER_ADDR")}
    os.environ |= {name: str(value) for name, value in variables.items()} | {"MASTER_ADDR": "localhost"}
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


@contextmanager
def _fake_process_groups(world_size: int, rank: int) -> Iterator[None]:
    # What is replaced stands below init_process_group and new_group, so that a program may have imported those by name
    # before.
    from torch.testing._internal.distributed.fake_pg import FakeStore

    def rendezvous(*args: Any, **kwargs: Any) -> Iterator[Any]:
        yield FakeStore(), rank, world_size

    def new_group(make: Callable[..., Any], size: int, place: int, ranks: Any, *given: Any, **options: Any) -> Any:
        options |= {"backend_options": None, "device_id": None}
        if not ranks:
            size, place = world_size, rank
        _, store, name, *_ = given
        with unset_fake_temporarily():
            return make(size, place, ranks, dist.Backend("fake"), store, name, **options)

    def init(before: Callable[..., Any], *args: Any, device_id: Any = None, **options: Any) -> Any:
        return before(*args, **options)

    hook = sys.excepthook
    with all_replaced(
        (distributed_c10d, "rendezvous", lambda _: rendezvous),
        (distributed_c10d, "_new_process_group_helper", around(new_group)),
        (distributed_c10d, "_store_based_barrier", answering(None)),
        (distributed_c10d, "_get_default_timeout", lambda _: lambda backend: distributed_c10d.default_pg_timeout),
        *((owner, "monitored_barrier", answering(None)) for owner in (distributed_c10d, dist)),
        *((owner, "init_process_group", around(init)) for owner in (distributed_c10d, dist)),
    ):
        try:
            yield
        finally:
            AXES.clear()
            _forget_meshes()
            if dist.is_initialized():
                dist.destroy_process_group()
            sys.excepthook = hook


def _forget_meshes() -> None:
    # DTensor caches by meshes, which compare by shape and ranks: one of the next world may look the same and has other
    # process groups.
    from torch.distributed.tensor import _redistribute, debug

    for owner, name in ((debug, "_clear_sharding_prop_cache"), (_redistribute, "clear_redistribute_planner_cache")):
        getattr(owner, name, lambda: None)()
    for name in ("_gen_transform_infos", "_gen_transform_infos_non_cached"):
        getattr(getattr(_redistribute, name, None), "cache_clear", lambda: None)()


def _on_cpu(init: Callable[..., None], mesh: DeviceMesh, device_type: str, *args: Any, **options: Any) -> None:
    with unset_fake_temporarily():
        init(mesh, "cpu", *map(_numbered, args), **{name: _numbered(option) for name, option in options.items()})
        name_groups(mesh)


def _numbered(value: Any) -> Any:
    # Ranks of a mesh that were given as a fake tensor: those of a view of ``torch.arange``, as programs make it.
    if not isinstance(value, FakeTensor):
        return value
    whole = value.untyped_storage().nbytes() // value.element_size()
    return torch.arange(whole, dtype=value.dtype).as_strided(value.size(), value.stride(), value.storage_offset())


# A device mesh stores its ranks, which must have values.
_outside = inside(unset_fake_temporarily)
_METHODS = names("""
    _flatten _unflatten _create_flatten_mesh _create_unflatten_mesh _get_all_submeshes _create_sub_mesh get_local_rank
    get_coordinate
""")
_MESHES: tuple[Patch, ...] = (
    (DeviceMesh, "__init__", around(_on_cpu)),
    *((DeviceMesh, method, _outside) for method in _METHODS),
    *((DeviceMesh, each, lambda method: staticmethod(_outside(method))) for each in ("_concatenate", "from_group")),
)


def _stage_on_cpu(init: Callable[..., None], stage: Any, *args: Any, **kwargs: Any) -> None:
    init(stage, *args, **kwargs)
    stage.device = torch.device("cpu")


def _asked_of_plain(method: Callable[..., Any], stage: Any, output: Any) -> Any:
    return method(stage, torch.empty(0) if type(output) is FakeTensor else output)


class _Distributed:
    """torch.distributed as a pipeline's schedule sees it: with processes that answer."""

    def __init__(self, module: Any) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)

    def get_backend(self, group: Any = None) -> str:
        # Schedules ask nothing of a group whose backend is fake.
        return "gloo"


# A stage allocates its buffers on the device it is given; before its first step torch saves random states. Stages ask
# each other for shapes, which torch since 2.14 does not begin in a fake process group; here they are answered
# (`program.Messages`). Since 2.15 a stage frees what it has sent where that is a plain tensor.
_STAGE = getattr(stages, "_PipelineStageBase", None)
_STAGES: tuple[Patch, ...] = (
    (_STAGE, "__init__", around(_stage_on_cpu)),
    (_STAGE, "_output_slot_is_releasable", around(_asked_of_plain)),
    (torch.random, "fork_rng", lambda _: lambda *args, **kwargs: nullcontext()),
    (schedules, "dist", _Distributed),
)


def _swap(mode: FakeTensorMode, swap: Callable[..., None], a: Tensor, b: Tensor) -> None:
    # torch.utils.swap_tensors, which model.to(dtype) and to_empty call, refuses tensors with weak references to them;
    # the mode's memo has some, and no other may be left here.
    for tensor in (a, b):
        if isinstance(tensor, FakeTensor):
            _forget(mode, tensor)
    swap(a, b)


def _forget(mode: FakeTensorMode, tensor: Tensor) -> None:
    """Remove a fake tensor from its mode's memo of which real one it was made from."""
    memo: Any = mode.fake_tensor_converter.meta_converter.tensor_memo
    for reference in weakref.getweakrefs(tensor):
        key = getattr(reference, "key", None)
        if memo.data.get(key) is reference:
            del memo.data[key]

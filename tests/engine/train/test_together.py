"""Groups of a mesh and the joint norm in a process alone: gloo of one rank, and ranks of which the others are fake."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from trainledger.engine.train.parallel.mesh import limit_waiting
from trainledger.engine.train.parallel.model_on_rank import joint_norm


@pytest.fixture
def alone() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def four() -> Iterator[DeviceMesh]:
    """A mesh of 2 x 2 ranks, of which this is the first; a collective leaves what it is given."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    yield init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "tensor"))
    dist.destroy_process_group()


def test_every_group_waits_as_long_as_a_run_says(alone: None) -> None:
    groups = [dist.group.WORLD, dist.new_group([0], backend="gloo")]
    limit_waiting(47.0)
    assert [each._get_backend(torch.device("cpu")).options._timeout for each in groups] == [timedelta(seconds=47)] * 2


@pytest.mark.parametrize("foreach", [False, True])
def test_norm_of_parts_and_of_what_each_rank_has(four: DeviceMesh, foreach: bool) -> None:
    """What is whole on two ranks counts half on each; of parts the fake sum has this rank's alone."""
    sharded = DTensor.from_local(torch.full((4,), 3.0), four, [Shard(0), Replicate()])
    whole = DTensor.from_local(torch.full((2,), 4.0), four, [Replicate(), Replicate()])
    norm = joint_norm(four, [sharded, whole], foreach=foreach)
    assert norm.item() == pytest.approx((4 * 9 + 2 * 16 / 2) ** 0.5)


@pytest.mark.parametrize("foreach", [False, True])
def test_norms_of_whole_gradients_are_torchs(foreach: bool) -> None:
    gradients: list[Tensor] = [torch.randn(3, 5), torch.randn(7)]
    assert joint_norm(None, gradients, foreach=foreach) == torch.nn.utils.get_total_norm(gradients, foreach=foreach)


def test_squares_of_bf16_are_summed_in_fp32(four: DeviceMesh) -> None:
    gradient = DTensor.from_local(torch.ones(4, dtype=torch.bfloat16), four, [Shard(0), Shard(0)])
    assert joint_norm(four, [gradient], foreach=False).dtype == torch.float32

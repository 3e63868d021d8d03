"""The memory of a device: tensors at their peak, and what libraries and driver take, each with its source."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from trainledger.forecast.predict.kernel import HOPPER
from trainledger.forecast.predict.roofline import Machine
from trainledger.ledger.entry import Amounts, Int
from trainledger.ledger.model.parameters import leaves_of
from trainledger.spec.device import Device, Overhead
from trainledger.spec.frozen import frozen
from trainledger.spec.recipe import Recipe
from trainledger.spec.run import Run

ROUNDING = 512  # bytes to which PyTorch's CUDA allocator rounds every block up (c10/cuda/CUDACachingAllocator.cpp)
TENSORS_ALONE = "tensors only: other memory on this device is not known and not counted"
GROUPED_STREAMS = 4  # of Transformer Engine's grouped matmuls (nvte_get_num_compute_streams)
_ALLOCATED = ("tensors", "rounding", "cuBLAS workspaces", "Transformer Engine workspace")
FRAMEWORKS = {
    "FSDP2's streams": "blocks of FSDP2's streams, which no other can use (pytorch/pytorch, _fsdp_collectives.py)",
    "DeepSpeed's pipeline buffers": "outputs and inputs of forwards in flight (DeepSpeed, runtime/pipe/engine.py)",
    "DeepSpeed's gradients": "gradients in addition to those of the account (DeepSpeed, runtime/zero/stage_1_and_2.py)",
}
_NO_GRAPHS = "no CUDA graph is captured; a program with graphs adds their private pools"
ON_THE_BOX = "the nominal size: how much of it is usable is not known"


@frozen
class MemoryLine:
    """So many bytes of a device, for what, and how that is known (``basis`` as in the ledger)."""

    name: str
    nbytes: Int
    basis: str
    source: str


@frozen
class DeviceMemory:
    """The lines of one device, and what it has: ``usable_nbytes`` is None where nothing is known of it."""

    lines: tuple[MemoryLine, ...]
    usable_nbytes: int | None
    usable_source: str

    @property
    def nbytes(self) -> Int:
        return sum(line.nbytes for line in self.lines)

    @property
    def allocated_nbytes(self) -> Int:
        """What PyTorch's allocator gave out at most (torch.cuda.max_memory_allocated): tensors and workspaces."""
        return sum(line.nbytes for line in self.lines if line.name in _ALLOCATED)

    @property
    def reserved_nbytes(self) -> Int:
        """What PyTorch's allocator has taken from the driver (torch.cuda.max_memory_reserved)."""
        more = ("fragmentation", *FRAMEWORKS)
        return self.allocated_nbytes + sum(line.nbytes for line in self.lines if line.name in more)

    @property
    def tensors_alone(self) -> bool:
        """Whether nothing outside the tensors is counted, as nothing is known of it: then the bytes are a bound."""
        return len(self.lines) == 1

    @property
    def fits(self) -> bool | None:
        """Whether all lines fit; None where the device's memory is not known."""
        return None if self.usable_nbytes is None else self.nbytes <= self.usable_nbytes


def memory_of_device(run: Run, peak_nbytes: int, machine: Machine, reserved: Amounts = ()) -> DeviceMemory:
    """What a device holds at the peak of a rank: of a catalog device its context and its communicators included.

    ``reserved`` are the ledger's of that rank.
    """
    if not isinstance(machine, Device):
        sheet = Device(machine.title, machine.title, {}, memory_nbytes=machine.memory_nbytes)
        return device_memory(peak_nbytes, sheet, {})
    # At most a parameter, its gradient and two moments of each tensor, and as many activations again.
    tensors = 8 * leaves_of(run.model).trained().tensors
    overheads = {overhead.name: overhead for overhead in machine.overheads}
    return device_memory(
        peak_nbytes,
        machine,
        overheads,
        tensors=tensors,
        groups=run.layout.communicators,
        recipe=run.recipe,
        reserved=reserved,
    )


def device_memory(
    peak_nbytes: Int,
    device: Device,
    overheads: Mapping[str, Overhead],
    *,
    tensors: Int = 0,
    groups: Sequence[int] = (),
    recipe: Recipe | None = None,
    reserved: Amounts = (),
) -> DeviceMemory:
    """The memory of a device whose tensors need ``peak_nbytes``.

    ``tensors`` is how many of them are alive at the peak, for the allocator's rounding (a bound: at most 511 bytes
    each); ``groups`` are the sizes of the rank's communicators; ``recipe`` says whose workspaces there are (None:
    PyTorch's alone, as it takes them by default), ``reserved`` what its framework's allocator reserves in addition. A
    device that is not NVIDIA's gets no CUDA lines: what its libraries take is not known here.
    """
    usable, source = device.usable_nbytes, device.usable_source
    if usable is None:
        usable, source = device.memory_nbytes, ON_THE_BOX
    lines = [MemoryLine("tensors", peak_nbytes, "exact", "the ledger's peak")]
    if device.compute_capability is not None:
        lines += [MemoryLine(name, nbytes, "assumed", FRAMEWORKS[name]) for name, nbytes in reserved]
        lines += _around(peak_nbytes, device.compute_capability, overheads, tensors, groups, recipe)
    return DeviceMemory(tuple(lines), usable, source)


def _around(
    peak_nbytes: Int,
    capability: float,
    overheads: Mapping[str, Overhead],
    tensors: Int,
    groups: Sequence[int],
    recipe: Recipe | None,
) -> Iterator[MemoryLine]:
    def line(name: str, nbytes: Int, overhead: Overhead) -> MemoryLine:
        return MemoryLine(name, nbytes, "assumed", f"{overhead.source}, read {overhead.date}")

    rounding = f"the allocator rounds every block up to {ROUNDING} bytes: at most {ROUNDING - 1} for each of {tensors}"
    yield MemoryLine("rounding", (ROUNDING - 1) * tensors, "bound", rounding)
    kind = "_hopper" if int(capability) == int(HOPPER) else ""
    if recipe is not None and recipe.deterministic:
        kind = "_deterministic"
    workspace = overheads[f"cublas_workspace{kind}"]
    # The thread that runs forward and autograd's thread that runs backward have a handle each.
    yield line("cuBLAS workspaces", 2 * workspace.nbytes, workspace)
    if recipe is not None and recipe.framework == "megatron-core":
        own = overheads[
            "transformer_engine_workspace_hopper" if capability >= HOPPER else "transformer_engine_workspace"
        ]
        yield line("Transformer Engine workspace", own.nbytes * (1 + GROUPED_STREAMS * recipe.grouped_experts), own)
    slack = overheads["fragmentation"]
    lost = slack.share * peak_nbytes
    yield line("fragmentation", round(lost) if isinstance(lost, float) else lost, slack)
    graphs = recipe is not None and recipe.cuda_graphs
    pools = "what the pools of captured graphs keep is not known: nothing at least" if graphs else _NO_GRAPHS
    yield MemoryLine("CUDA graph pools", 0, "bound" if graphs else "exact", pools)
    context = overheads["cuda_context"]
    yield line("CUDA context", context.nbytes, context)
    several = [size for size in groups if size > 1]
    if several:
        pair, group = overheads["nccl_pair"], overheads["nccl_group"]
        yield line("NCCL buffers", sum((pair if size == 2 else group).nbytes for size in several), group)


def of_a_device(memory: DeviceMemory) -> str:
    """Words for its bytes: memory that is known to be usable, or what its maker states."""
    known = memory.usable_source != ON_THE_BOX
    return "of usable memory" if known else "of nominal memory (how much of it is usable is not known)"

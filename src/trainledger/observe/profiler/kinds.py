"""What kind of work a kernel or an operator is, by their names.

The operator that launched a kernel says it best; the kernel's own name says it where none is known (graphs, compiled
code, other libraries). A name that nothing fits is ``other``, never a guess.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from trainledger.observe.profiler.recording import KERNEL, NONE, Message, Recording, Spans
from trainledger.spec.plain import table_beside

CALLS = "views and autograd"  # of a program on the host: operators that compute nothing
RECOMPUTATION, COMMUNICATION = "recomputation", "communication"
# In the order in which the moments of a step are given to them where several run at once.
_COMPUTING = f"matmul attention convolution {RECOMPUTATION} optimizer norm loss embedding reduction".split()
KINDS = (*_COMPUTING, "elementwise", CALLS, "other")

UPDATE = re.compile(r"^Optimizer\.step#")  # what PyTorch calls the annotation around an optimizer's update
COLLECTIVE = re.compile(  # but for what FSDP copies into the message of a gather
    r"nccl|rccl|c10d(_functional)?::|gloo|all_?reduce|all_?gather(?!_copy)|reduce_?scatter|all_?to_?all", re.IGNORECASE
)
_WRITTEN: dict[str, Any] = table_beside(__file__)
_OPERATORS = tuple((kind, re.compile(pattern)) for kind, pattern in _WRITTEN["operators"])
_KERNELS = tuple((kind, re.compile(pattern, re.IGNORECASE)) for kind, pattern in _WRITTEN["kernels"])
_CALLS = re.compile(_WRITTEN["calls"])


def is_collective(name: str) -> bool:
    """Whether a kernel or an operator of this name sends something to other ranks.

    >>> is_collective("ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)")
    True
    """
    return COLLECTIVE.search(name) is not None


def kind_of_kernel(name: str) -> str:
    """The kind of a kernel by its own name.

    >>> kind_of_kernel("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n"), kind_of_kernel("_anything_new")
    ('matmul', 'other')
    """
    return next((kind for kind, pattern in _KERNELS if pattern.search(name)), "other")


def kind_on_host(name: str) -> str:
    """The kind of an operator that runs on the host itself, where also those that compute nothing take time.

    >>> kind_on_host("aten::view"), kind_on_host("autograd::engine::evaluate_function: MmBackward0")
    ('views and autograd', 'views and autograd')
    """
    return COMMUNICATION if is_collective(name) else CALLS if _CALLS.search(name) else kind_of_operator(name)


def kind_of_operator(name: str) -> str:
    """The kind of an operator by its name.

    >>> kind_of_operator("aten::addmm"), kind_of_operator("aten::native_layer_norm"), kind_of_operator("aten::view")
    ('matmul', 'norm', 'other')
    """
    if name.startswith("triton_"):
        return kind_of_kernel(name)
    return next((kind for kind, pattern in _OPERATORS if pattern.search(name)), "other")


SENDS, OTHERS = "sends and receives", "other collectives"
_KINDS = ("reduce-scatter", "all-reduce", "all-gather", "all-to-all", "broadcast", "barrier")
_NAMES = {kind: re.compile(kind.replace("-", "_?"), re.IGNORECASE) for kind in _KINDS}
_NAMES[SENDS] = re.compile("send|recv|receive", re.IGNORECASE)
# NCCL runs sends, receives and all-to-alls by one kernel, whose name says nothing of them.
_ONE_KERNEL = re.compile(r"SendRecv|Generic", re.IGNORECASE)
ON_HOST = re.compile(r"^(gloo|mpi|ucc):")
_BYTES_OF = {1: "char|byte|bool|signed char|unsigned char|float8_e4m3fn|float8_e5m2", 2: "bfloat16|half|short"}
_BYTES_OF |= {4: "float|int", 8: "double|long|long int"}
_NBYTES = {dtype: nbytes for nbytes, dtypes in _BYTES_OF.items() for dtype in dtypes.split("|")}


@dataclass(frozen=True)
class Collectives:
    """Each collective of a recording in the order of their beginnings: when it ran, its kind, and what it sends."""

    spans: Spans
    kinds: tuple[str, ...]
    messages: tuple[Message | None, ...]

    def __len__(self) -> int:
        return len(self.spans)

    def between(self, begin_ns: int, end_ns: int) -> list[int]:
        """The indices of those that begin between two moments."""
        return np.flatnonzero(self.spans.begin_in((begin_ns, end_ns))).tolist()


def collectives(recording: Recording) -> Collectives:
    """The collectives of a recording."""
    if recording.on_device:
        numbers = [number for number, name in enumerate(recording.names) if is_collective(name)]
        work = np.flatnonzero(np.isin(recording.work.names, numbers) & (recording.work.kinds == KERNEL))
        spans = recording.work.where(work)
    else:
        spans = recording.named(recording.annotations, ON_HOST)
        work = np.full(len(spans), NONE)
    names = [recording.names[number] for number in spans.names.tolist()]
    messages = tuple(_message(recording, name, more) for name, more in zip(names, spans.more.tolist(), strict=True))
    kinds = tuple(_kind(recording, *each) for each in zip(names, work.tolist(), messages, strict=True))
    return Collectives(spans, kinds, messages)


def collective_named(name: str) -> str:
    """The kind of collective that a name speaks of; empty where it speaks of none.

    >>> collective_named("ncclDevKernel_AllReduce_Sum_bf16_RING_LL"), collective_named("_allgather_base")
    ('all-reduce', 'all-gather')
    """
    return next((kind for kind, pattern in _NAMES.items() if pattern.search(name)), "")


def payload_nbytes(message: Message) -> int | None:
    """The whole message as a ledger's entries have it: of all that is reduced, of what a gather makes.

    None where the size of its elements is not known.

    >>> payload_nbytes(Message("_allgather_base", 100, 800, "BFloat16", 8))
    1600
    """
    nbytes = _NBYTES.get(message.dtype.removeprefix("c10::").lower())
    return None if nbytes is None else max(message.elements_in, message.elements_out) * nbytes


def _kind(recording: Recording, name: str, work: int, message: Message | None) -> str:
    """By what a collective says of itself, else by its own name, else by what it was launched in."""
    names = [] if message is None else [message.collective]
    names += [] if _ONE_KERNEL.search(name) else [name]
    kinds = (collective_named(each) for each in (*names, *(() if work == NONE else _launched_in(recording, work))))
    return next(filter(None, kinds), OTHERS)


def _launched_in(recording: Recording, work: int) -> Iterator[str]:
    """The names of the operators, and then of the annotations, that a piece of device work was launched in."""
    of_launches, around = recording.annotations_of_launches
    launch = int(recording.launch_of_work[work])
    annotation = NONE if launch == NONE else int(of_launches[launch])
    operator = int(recording.operator_of_work[work])
    for spans, at, outer in (
        (recording.operators, operator, recording.callers),
        (recording.annotations, annotation, around),
    ):
        while at != NONE:
            yield recording.names[spans.names[at]]
            at = int(outer[at])


def _message(recording: Recording, name: str, more: int) -> Message | None:
    """What a kernel says of its collective; of a host's annotation, made of the sizes of the tensors that go in."""
    given = None if more == NONE else recording.arguments[more]
    if given is None or isinstance(given, Message):
        return given
    if not any(given.sizes):
        return None
    collective, ranks = name.partition(":")[2], recording.ranks or 0
    elements = sum(prod(size) for size in given.sizes if size)
    out = elements * ranks if collective_named(collective) == "all-gather" else 0  # gloo records only what goes in
    return Message(collective, elements, out, given.types[0] if given.types else "", ranks)

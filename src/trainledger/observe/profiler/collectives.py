"""The collectives of a recording: kernels of a device, and on a host what a backend such as gloo annotates."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np

from trainledger.observe.profiler.kinds import is_collective
from trainledger.observe.profiler.recording import KERNEL, NONE, Column, Message, Recording, Shapes, Spans

SENDS = "sends and receives"
OTHERS = "other collectives"
_KINDS = (
    ("reduce-scatter", r"reduce_?scatter"), ("all-reduce", r"all_?reduce"), ("all-gather", r"all_?gather"),
    ("all-to-all", r"all_?to_?all"), ("broadcast", r"broadcast"), ("barrier", r"barrier"),
    (SENDS, r"send|recv|receive"),
)  # fmt: skip
_NAMES = tuple((name, re.compile(pattern, re.IGNORECASE)) for name, pattern in _KINDS)
_ONE_KERNEL = re.compile(r"SendRecv|Generic", re.IGNORECASE)
ON_HOST = re.compile(r"^(gloo|mpi|ucc):")
_NBYTES = {
    "float": 4, "bfloat16": 2, "half": 2, "double": 8, "long": 8, "int": 4, "short": 2, "char": 1, "byte": 1, "bool": 1,
    "long int": 8, "signed char": 1, "unsigned char": 1, "float8_e4m3fn": 1, "float8_e5m2": 1,
}  # fmt: skip


@dataclass(frozen=True)
class Collectives:
    """Each collective of a recording in the order of their beginnings: when it ran, its kind, and what it sends.

    ``work`` is the index of each among the device work, `NONE` on a host.
    """

    spans: Spans
    kinds: tuple[str, ...]
    messages: tuple[Message | None, ...]
    work: Column

    def __len__(self) -> int:
        return len(self.spans)

    def between(self, begin_ns: int, end_ns: int) -> list[int]:
        """The indices of those that begin between two moments."""
        begins = self.spans.begins_ns
        return np.flatnonzero((begins >= begin_ns) & (begins < end_ns)).tolist()


def collectives(recording: Recording) -> Collectives:
    """The collectives of a recording."""
    if recording.on_device:
        numbers = [number for number, name in enumerate(recording.names) if is_collective(name)]
        at = np.flatnonzero(np.isin(recording.work.names, numbers) & (recording.work.kinds == KERNEL))
        spans = recording.work.where(at)
    else:
        spans = recording.named(recording.annotations, ON_HOST)
        at = np.full(len(spans), NONE)
    messages = tuple(
        _message(recording, name, more) for name, more in zip(spans.names.tolist(), spans.more.tolist(), strict=True)
    )
    kinds = tuple(_kind(recording, spans, at, index, message) for index, message in enumerate(messages))
    return Collectives(spans, kinds, messages, at)


def collective_named(name: str) -> str:
    """The kind of collective that a name speaks of; empty where it speaks of none.

    >>> collective_named("ncclDevKernel_AllReduce_Sum_bf16_RING_LL"), collective_named("_allgather_base")
    ('all-reduce', 'all-gather')
    """
    return next((kind for kind, pattern in _NAMES if pattern.search(name)), "")


def payload_nbytes(message: Message) -> int | None:
    """The whole message as a ledger's entries have it: of all that is reduced, of what a gather makes.

    None where the size of its elements is not known.

    >>> payload_nbytes(Message("_allgather_base", 100, 800, "BFloat16", 8))
    1600
    """
    nbytes = _NBYTES.get(message.dtype.removeprefix("c10::").lower())
    return None if nbytes is None else max(message.elements_in, message.elements_out) * nbytes


def _kind(recording: Recording, spans: Spans, work: Column, index: int, message: Message | None) -> str:
    """By what a collective says of itself, else by its own name, else by what it was launched in.

    NCCL runs sends, receives and all-to-alls by one kernel, whose name says nothing.
    """
    names = [message.collective] if message is not None else []
    own = recording.names[spans.names[index]]
    if not _ONE_KERNEL.search(own):
        names.append(own)
    if work[index] != NONE:
        names += _launched_in(recording, int(work[index]))
    return next((kind for each in names if (kind := collective_named(each))), OTHERS)


def _launched_in(recording: Recording, work: int) -> Iterator[str]:
    """The names of the operators, and then of the annotations, that a piece of device work was launched in."""
    operator = int(recording.operator_of_work[work])
    while operator != NONE:
        yield recording.names[recording.operators.names[operator]]
        operator = int(recording.callers[operator])
    launch = int(recording.launch_of_work[work])
    if launch != NONE:
        of_launches, around = recording.annotations_of_launches
        annotation = int(of_launches[launch])
        while annotation != NONE:
            yield recording.names[recording.annotations.names[annotation]]
            annotation = int(around[annotation])


def _message(recording: Recording, name: int, more: int) -> Message | None:
    given = None if more == NONE else recording.arguments[more]
    if isinstance(given, Message) or given is None:
        return given
    return _of_shapes(recording, recording.names[name].partition(":")[2], given)


def _of_shapes(recording: Recording, collective: str, given: Shapes) -> Message | None:
    """What a host's annotation says: the sizes of the tensors that go in, all of one format."""
    sizes: Sequence[tuple[int, ...]] = [each for each in given.sizes if each]
    if not sizes:
        return None
    elements, ranks = sum(map(prod, sizes)), recording.ranks or 0
    out = elements * ranks if collective_named(collective) == "all-gather" else 0  # only what goes in is recorded
    return Message(collective, elements, out, given.types[0] if given.types else "", ranks)

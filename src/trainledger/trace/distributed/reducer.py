"""DDP's reducer in Python: torch's own is C++ and reads the data of gradients, which fake tensors have not.

It fills buckets as gradients arrive, sends each bucket when it and all before it are full, and copies the sums back
when the backward is over (Li et al. 2020, PyTorch Distributed, section 3.2). Buckets are formed again in the order in
which the gradients of the first backward came; torch does so when the second forward begins, this at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import distributed as ddp

from trainledger.spec.problem import InvalidInput, Problem
from trainledger.trace.patches import Patch, answering, around, names

Hook = Callable[[Any, Any], Any]  # of its state and a bucket, as DDP's users write it


# What DDP calls to log, to note the time, and for ranks that have run out of data.
_WITHOUT_EFFECT = names("""
    set_logger prepare_for_forward _rebuild_buckets _push_all_rebuilt_params _check_reducer_finalized
""")


class Bucket:
    """Gradients that are sent together: a flat buffer, and each gradient's place in it.

    Its methods are what a communication hook may ask of ``torch.distributed.GradBucket``.
    """

    def __init__(self, indices: Sequence[int], of: Sequence[nn.Parameter], number: int, is_last: bool) -> None:
        self.indices = list(indices)
        self._parameters = [of[index] for index in indices]
        sizes = [parameter.numel() for parameter in self._parameters]
        first = self._parameters[0]
        self.flat = self._buffer = torch.empty(sum(sizes), dtype=first.dtype, device=first.device)
        pieces = zip(self.indices, self._parameters, torch.split(self.flat, sizes), strict=True)
        self.views = {index: piece.view(parameter.shape) for index, parameter, piece in pieces}
        self.waits_for = set(self.indices)
        self._number, self._is_last = number, is_last

    def buffer(self) -> Tensor:
        return self._buffer

    def set_buffer(self, buffer: Tensor) -> None:
        self._buffer = buffer

    def gradients(self) -> list[Tensor]:
        return list(self.views.values())

    def parameters(self) -> list[nn.Parameter]:
        return self._parameters

    def index(self) -> int:
        return self._number

    def is_last(self) -> bool:
        return self._is_last


class Reducer:
    """What `DistributedDataParallel` calls of ``torch.distributed.Reducer``."""

    def __init__(
        self,
        params: Sequence[nn.Parameter],
        bucket_indices: Sequence[Sequence[int]],
        per_bucket_size_limits: Sequence[int],
        process_group: dist.ProcessGroup,
        expect_sparse_gradients: Sequence[bool] = (),
        bucket_bytes_cap: int = 25 * 2**20,
        find_unused_parameters: bool = False,
        gradient_as_bucket_view: bool = False,
        param_to_name_mapping: dict[int, str] | None = None,
        first_bucket_bytes_cap: int = 2**20,
        *more: Any,
    ) -> None:
        self._parameters = list(params)
        self.group = process_group
        self._find_unused = find_unused_parameters
        self._views = gradient_as_bucket_view
        self._limits = [first_bucket_bytes_cap, bucket_bytes_cap]
        if any(expect_sparse_gradients):
            rule = "DDP gathers the rows of sparse gradients, whose number is another in each step: they are not traced"
            raise InvalidInput([Problem("sparse", True, rule, "sparse=False of the embedding")])
        self.send: Callable[[Bucket], None] | None = None  # how a bucket is sent instead
        self._arrived: list[int] = []
        self._static = self._rebuilt = False
        self._expecting = False
        self._next = 0
        self._fill(bucket_indices)
        for index, parameter in enumerate(self._parameters):
            hooks: Any = parameter.register_post_accumulate_grad_hook
            hooks(lambda _, index=index: self._ready(index))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name in _WITHOUT_EFFECT:
            return lambda *args: None
        raise NotImplementedError(f"what DDP asks of its reducer by {name} is not traced")

    def _fill(self, indices: Sequence[Sequence[int]]) -> None:
        last = len(indices) - 1
        self._buckets = [Bucket(index, self._parameters, at, at == last) for at, index in enumerate(indices)]
        self._bucket_of = {index: bucket for bucket in self._buckets for index in bucket.indices}

    # What DDP calls around forward and backward

    def _set_static_graph(self) -> None:
        self._static = True

    def prepare_for_backward(self, outputs: Sequence[Tensor]) -> None:
        """Gradients of the coming backward are sent; without this call they only add up (``no_sync``)."""
        self._expecting = True
        self._next = 0
        for bucket in self._buckets:
            bucket.waits_for = set(bucket.indices)
        if self._find_unused and not self._static:
            used = _leaves_of(outputs)
            self._unused = [at for at, parameter in enumerate(self._parameters) if id(parameter) not in used]
        else:
            self._unused = []

    # One gradient after the other

    def _ready(self, index: int) -> None:
        if not self._expecting:
            return
        self._arrived.append(index)
        while self._unused:
            self._mark(self._unused.pop(0))
        self._mark(index)

    def _mark(self, index: int) -> None:
        bucket, parameter = self._bucket_of[index], self._parameters[index]
        view = bucket.views[index]
        if index not in bucket.waits_for:
            # A second gradient in one backward, which torch refuses unless the graph is static
            return
        with torch.no_grad():
            if parameter.grad is None:
                view.zero_()
            elif parameter.grad is not view:
                if self.send is None:
                    torch.mul(parameter.grad, 1.0 / self.group.size(), out=view)
                else:
                    view.copy_(parameter.grad)
                if self._views:
                    parameter.grad = view
            elif self.send is None:
                view.div_(self.group.size())
        bucket.waits_for.discard(index)
        self._send_full()

    def _send_full(self) -> None:
        while self._next < len(self._buckets) and not self._buckets[self._next].waits_for:
            bucket = self._buckets[self._next]
            if self.send is None:
                dist.all_reduce(bucket.flat, group=self.group, async_op=True)
            else:
                self.send(bucket)
            self._next += 1
            if self._next == len(self._buckets):
                torch.autograd.Variable._execution_engine.queue_callback(self._finish)

    def _finish(self) -> None:
        # The backward is over: the sums go back into the gradients.
        self._expecting = False
        if self._find_unused and not self._static:
            used = torch.zeros(len(self._parameters), dtype=torch.int32)
            dist.all_reduce(used, group=self.group)
        if not self._views:
            with torch.no_grad():
                for bucket in self._buckets:
                    for index, view in bucket.views.items():
                        gradient = self._parameters[index].grad
                        if gradient is not None:
                            gradient.copy_(view)
        if not self._rebuilt and (self._static or not self._find_unused):
            self._rebuild()
        self._arrived.clear()

    def _rebuild(self) -> None:
        # The first bucket may be smaller (torch.distributed._DEFAULT_FIRST_BUCKET_BYTES, 1 MiB), so that sending begins
        # early.
        self._rebuilt = True
        order = list(dict.fromkeys(self._arrived))
        if len(order) != len(self._parameters):
            return
        parameters = [self._parameters[each] for each in order]
        assign: Any = vars(dist)["_compute_bucket_assignment_by_size"]
        indices, _ = assign(parameters, self._limits, [False] * len(order))
        self._fill([[order[at] for at in each] for each in indices])
        if self._views:
            for index in order:
                if self._parameters[index].grad is not None:
                    self._parameters[index].grad = self._bucket_of[index].views[index]


class _Notes(dict[str, Any]):
    """What DDP has noted: nothing, under any name."""

    strs_map: ClassVar[dict[str, str]] = {}
    ints_map: ClassVar[dict[str, int]] = {}


class _Logger:
    """Notes nothing."""

    def __init__(self, reducer: Reducer) -> None:
        pass

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return lambda *args, **kwargs: _Notes()


def _leaves_of(outputs: Sequence[Tensor]) -> set[int]:
    """The parameters, by their id, that backward from these tensors comes to."""
    found: set[int] = set()
    nodes = [output.grad_fn for output in outputs if isinstance(output, Tensor) and output.grad_fn is not None]
    seen = set(nodes)
    while nodes:
        node = nodes.pop()
        variable = getattr(node, "variable", None)
        if variable is not None:
            found.add(id(variable))
        for after, _ in node.next_functions:
            if after is not None and after not in seen:
                seen.add(after)
                nodes.append(after)
    return found


def _without_devices(init: Callable[..., None], ddp: Any, module: nn.Module, *given: Any, **options: Any) -> None:
    # DDP takes the numbers of GPUs only for modules that are on one, and makes streams only where one is.
    if options.get("mixed_precision") is not None:
        rule = "DDP casts its parameters on another stream of the device during the forward, which is not traced"
        nearest = "torch.autocast in the forward, or FSDP2 with a MixedPrecisionPolicy"
        raise InvalidInput([Problem("mixed_precision", None, rule, nearest)])
    other = {name: value for name, value in options.items() if name not in ("device_ids", "output_device")}
    init(ddp, module, None, None, *given[2:], **other)


def _broadcast(group: dist.ProcessGroup, tensors: Sequence[Tensor], buffer_nbytes: int, source: int = 0) -> None:
    """Tensors of one format joined into buffers, and copied back from them on all ranks but the source."""
    for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
        waiting: list[Tensor] = []
        for each in (*(tensor for tensor in tensors if tensor.dtype == dtype), None):
            if each is not None:
                waiting.append(each)
            nbytes = sum(one.numel() * one.element_size() for one in waiting)
            if waiting and (each is None or nbytes >= buffer_nbytes):
                flat = torch.cat([one.reshape(-1) for one in waiting])
                dist.broadcast(flat, group=group, group_src=source)
                if group.rank() != source:
                    pieces = torch.split(flat, [one.numel() for one in waiting])
                    for one, piece in zip(waiting, pieces, strict=True):
                        one.copy_(piece.view_as(one))
                waiting = []


def _take_hook(reducer: Reducer, state: Any, hook: Hook) -> None:
    def send(bucket: Bucket) -> None:
        future = hook(state, bucket)
        result = future.wait() if hasattr(future, "wait") else future
        result = result[0] if isinstance(result, (list, tuple)) else result
        if isinstance(result, Tensor) and result is not bucket.flat:
            bucket.flat.copy_(result)
        bucket.set_buffer(bucket.flat)

    reducer.send = send


def _take_builtin_hook(reducer: Reducer, kind: Any) -> None:
    def send(bucket: Bucket) -> None:
        if "FP16" in str(kind):
            narrow = bucket.flat.to(torch.float16).div_(reducer.group.size())
            dist.all_reduce(narrow, group=reducer.group, async_op=True)
            bucket.flat.copy_(narrow)
        else:
            bucket.flat.div_(reducer.group.size())
            dist.all_reduce(bucket.flat, group=reducer.group, async_op=True)

    reducer.send = send


# What lets `DistributedDataParallel` work on fake tensors.
REDUCER: tuple[Patch, ...] = (
    (dist, "Reducer", lambda _: Reducer),
    (dist, "Logger", lambda _: _Logger),
    (dist, "_broadcast_coalesced", lambda _: _broadcast),
    (dist, "_register_comm_hook", lambda _: _take_hook),
    (dist, "_register_builtin_comm_hook", lambda _: _take_builtin_hook),
    (ddp, "_verify_param_shape_across_processes", answering(None)),
    (ddp, "_sync_module_states", answering(None)),
    (ddp.DistributedDataParallel, "__init__", around(_without_devices)),
)

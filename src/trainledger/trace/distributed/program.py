"""One rank of a program traced: the program builds its model, takes a step to settle, and takes the recorded one.

Ranks send each other objects while a program is built, as pipeline stages tell the next one their shapes. A rank that
waits for an object stops; the program runs as the sender until it has sent it, and then the first rank runs again from
its beginning, with the object there. Programs must do the same each time they run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import distributed_c10d

from trainledger.ledger.ledger import Ledger
from trainledger.trace.distributed.steps import Finished, Steps
from trainledger.trace.distributed.world import World, entered
from trainledger.trace.fakes.kernels import kernels_of
from trainledger.trace.fakes.tensors import fake_batch
from trainledger.trace.loss import NoScalarLossError, loss_of
from trainledger.trace.patches import all_replaced
from trainledger.trace.recorder.source_lines import ends_here
from trainledger.trace.step import Batch, call

EVERYONE = -1
Key = tuple[int, int, int]  # sender, receiver, number of the message between the two
Program = Callable[[], Any]


class Awaited(BaseException):
    """A rank needs an object that has not been sent yet."""

    def __init__(self, key: Key) -> None:
        super().__init__(key)
        self.key = key


class Sent(BaseException):
    """The awaited object has been sent."""


class Messages:
    """What ranks have sent each other so far."""

    def __init__(self) -> None:
        self._sent: dict[Key, Any] = {}

    @contextmanager
    def of(self, rank: int, until: Key | None = None) -> Iterator[None]:
        """Send and receive as this rank; `Sent` is raised when the object ``until`` is there."""
        counts: Counter[tuple[int, int]] = Counter()

        def put(receiver: int, value: Any) -> None:
            counts[rank, receiver] += 1
            key = rank, receiver, counts[rank, receiver]
            self._sent[key] = value
            if key == until:
                raise Sent

        def take(sender: int, receiver: int) -> Any:
            counts[sender, receiver] += 1
            key = sender, receiver, counts[sender, receiver]
            if key not in self._sent:
                raise Awaited(key)
            return self._sent[key]

        def send(objects: Any, dst: Any = None, group: Any = None, *rest: Any, **named: Any) -> None:
            put(_peer(dst, group, named.get("group_dst", rest[1] if len(rest) > 1 else None)), list(objects))

        def receive(objects: Any, src: Any = None, group: Any = None, *rest: Any, **named: Any) -> int:
            sender = _peer(src, group, named.get("group_src", rest[1] if len(rest) > 1 else None))
            objects[:] = take(sender, rank)
            return sender

        def broadcast(objects: Any, src: Any = None, group: Any = None, *rest: Any, **named: Any) -> None:
            sender = _peer(src, group, named.get("group_src", rest[1] if len(rest) > 1 else None) or 0)
            if sender == rank:
                put(EVERYONE, list(objects))
            else:
                objects[:] = take(sender, EVERYONE)

        def gather(objects: Any, value: Any, group: Any = None) -> None:
            # Assuming that every rank has the same
            objects[:] = [value] * len(objects)

        functions: dict[str, Any] = {"send_object_list": send, "recv_object_list": receive}
        functions |= {"broadcast_object_list": broadcast, "all_gather_object": gather}
        owners = (dist, distributed_c10d)
        with all_replaced(*((owner, name, lambda _, f=f: f) for name, f in functions.items() for owner in owners)):
            yield


def _peer(global_rank: int | None, group: Any, group_rank: int | None) -> int:
    if global_rank is not None:
        return global_rank
    assert group_rank is not None
    return dist.get_global_rank(group or dist.group.WORLD, group_rank)  # type: ignore[arg-type]


def trace_rank(
    program: Program,
    *,
    world_size: int,
    rank: int = 0,
    batch: Batch | None = None,
    loss: Callable[[Any], Tensor] | None = None,
    optimizer: Callable[[Any], torch.optim.Optimizer] | None = None,
    first_step: bool = False,
    kernels: str = "cpu",
    assume: Sequence[str] = (),
) -> Ledger:
    """The ledger of one training step of one rank of ``world_size``; nothing is sent and nothing is computed.

    ``program`` is called without arguments in a `fake_world`, as torchrun would call a script's ``main``. It either
    trains on its own, and then what runs from the end of its first optimizer step to the end of its second is
    recorded; or it returns a function that takes one step, or the parts of one: a model alone, or a tuple of the
    model and any of an optimizer, a batch, and a loss function, which are distinguished by their types. What it does
    not return may be given: ``batch``, ``loss``, and ``optimizer``, which makes one of the model's parameters. With
    ``first_step`` the first step is recorded, of a program that returns; ``kernels`` and ``assume`` are as in `trace`.

    Sizes are this rank's. Entries of kind ``collective`` say what is sent: the bytes of the whole message
    (`Entry.payload`), the mesh axis and the number of ranks. The parameters counted are the elements this rank
    holds. Raises `InvalidInput` for a rank outside the world, ValueError for a program that takes no step.
    """
    messages = Messages()

    def run(as_rank: int, until: Any = None) -> Ledger:
        """The program as a rank; it starts again each time that it lacks what another rank sends."""
        while True:
            try:
                with entered(world_size, as_rank) as world, messages.of(as_rank, until), kernels_of(kernels):
                    return _step_of(world, program, batch, loss, optimizer, first_step=first_step, assume=assume)
            except Awaited as missing:
                awaited = missing.key
            if awaited[0] == as_rank:
                raise ValueError(f"rank {as_rank} waits for an object that it must send itself")
            if (awaited, until) in asked:
                raise ValueError(f"ranks {awaited[0]} and {as_rank} wait for an object of each other")
            asked.add((awaited, until))
            try:
                run(awaited[0], awaited)
            except Sent:
                continue
            raise ValueError(f"rank {awaited[0]} does not send the object that rank {as_rank} waits for")

    asked: set[Any] = set()
    return run(rank)


def _step_of(
    world: World,
    program: Program,
    batch: Batch | None,
    loss: Callable[[Any], Tensor] | None,
    optimizer: Callable[[Any], torch.optim.Optimizer] | None,
    *,
    first_step: bool,
    assume: Sequence[str],
) -> Ledger:
    steps = Steps(assume)
    world.gpu.live, world.gpu.note = steps.live_nbytes, steps.left_out.setdefault
    with steps:
        try:
            steps.between_optimizer_steps = True
            built = program()
            steps.between_optimizer_steps = False
            if steps.recorder is None:
                step = _as_step(built, batch, loss, optimizer, steps)
                if not first_step:
                    step()
                steps.record()
                step()
        except Finished:
            pass
        except Exception as error:
            if isinstance(error, NoScalarLossError) or steps.recorder is None or not steps.recorder.events:
                raise
            steps.recorder.end_here(error, steps.recorder.phases.current)
    return steps.ledger()


def _as_step(
    built: Any,
    batch: Batch | None,
    loss: Callable[[Any], Tensor] | None,
    optimizer: Callable[[Any], torch.optim.Optimizer] | None,
    steps: Steps,
) -> Callable[[], object]:
    """One step of what a program returned."""
    if callable(built) and not isinstance(built, nn.Module):
        return built  # type: ignore[no-any-return]
    model, own, batch, loss = _parts(built, batch, loss)
    if model is None:
        returned = "nothing" if built is None else type(built).__name__
        raise ValueError(
            f"the program took {steps.n_steps} optimizer steps and returned {returned}: let it take two or more, "
            "or return a function that takes one, or a model with its optimizer and batch"
        )
    if batch is None:
        raise ValueError("a model alone makes no step: return a batch with it, or give one with batch=")
    inputs = fake_batch(batch, torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE))
    if own is None and optimizer is not None:
        own = optimizer(model.parameters())
    steps.root = model

    def step() -> None:
        value = loss_of(call(model, inputs), loss)
        value.backward()  # type: ignore[no-untyped-call]
        del value
        if own is not None:
            own.step()
        model.zero_grad(set_to_none=True)

    ends_here(step)
    return step


def _parts(built: Any, batch: Any, loss: Any) -> tuple[nn.Module | None, torch.optim.Optimizer | None, Any, Any]:
    """What a program returned, distinguished by the type of each part."""
    model = optimizer = None
    for module in built if isinstance(built, Sequence) and not isinstance(built, str) else (built,):
        if isinstance(module, nn.Module) and model is None:
            model = module
        elif isinstance(module, torch.optim.Optimizer):
            optimizer = module
        elif callable(module) and not isinstance(module, Tensor):
            loss = module
        elif module is not None:
            batch = module
    return model, optimizer, batch, loss


for _function in (trace_rank, _step_of):
    ends_here(_function)

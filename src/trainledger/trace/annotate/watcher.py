"""Observes each operation and optimizer step of a program, for its account and for what looks for findings."""

from __future__ import annotations

import functools
import os
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType
from typing import Any

import torch
import torch.optim.optimizer as optimizers
from torch import Tensor, nn
from torch._ops import OpOverload

from trainledger.ledger.entry import Event, Storage
from trainledger.trace import script
from trainledger.trace.annotate import copies
from trainledger.trace.annotate.annotation import COPY, MOST_SHOWN, VIEW, Account, LineAccount, Shown, Work
from trainledger.trace.annotate.copies import SYNCHRONIZING, Broadcasts, Conversions, Syncs
from trainledger.trace.annotate.graphs import (
    HEAVY,
    Forwards,
    Gradients,
    Graph,
    Named,
    Outliving,
    Updates,
    gradients_of,
    nodes_so_far,
)
from trainledger.trace.annotate.habits import Habits
from trainledger.trace.annotate.loops import LoopGraphs, Tally
from trainledger.trace.annotate.source import Caller, Callers, Files, Holder, holder_of, names_of, snapshots
from trainledger.trace.fakes.own_code import record_launch
from trainledger.trace.patches import Args, Kwargs, replaced
from trainledger.trace.recorder.recorder import Recorder
from trainledger.trace.recorder.source_lines import TORCH, Lines
from trainledger.trace.recorder.storages import dtype_name, tensors_in

_LOADERS = os.path.join(TORCH, "utils", "data", "")


class Watcher:
    """Observes its ``recorder``. ``device_of`` gives the device that a tensor pretends to be on.

    A program that is watched ``from_start`` has no tensors before it.
    """

    def __init__(self, files: Files, shapes: bool = False, *, from_start: bool = False) -> None:
        self.account = account = Account()
        self.callers = Callers(files)
        self.lines = Lines(files.counts)
        self.gradients = Gradients()
        self.graph = Graph()
        self.loops = LoopGraphs(files, self.graph)
        self.forwards = Forwards()
        self.conversions = Conversions()
        self.broadcasts = Broadcasts()
        self.syncs = Syncs()
        self.updates = Updates(lambda tensor: self._record_of(tensor))
        self.device_of: Callable[[Tensor], str] = lambda tensor: str(tensor.device)
        self.after: Callable[[Args, Kwargs, Event], bool] = lambda args, kwargs, event: False
        followers = (self.gradients, self.graph, self.conversions, self.updates)
        self.dies: list[Callable[[Storage], None]] = [follower.gone for follower in followers]
        self.stale: list[dict[str, Any]] = []  # copies of variables, which themselves would outlive a step
        self.outliving = Outliving()
        self.dies.append(lambda record: self.outliving.gone(record, self.recorder.storages.live.values()))
        self.uncounted: dict[str, str] = {}
        self._shapes = shapes
        self._backward_line = ""
        self._in_backward = False
        self._nodes = 0  # of autograd, made before the last operation of a forward
        account.gone = self._gone
        follow: dict[str, Any] = {"observe": self.operation, "freed": account.freed}
        follow["appeared"] = account.appear if from_start else None
        self.recorder = Recorder(nn.Module(), find_phases=True, lines=self.lines, **follow)
        self.recorder.higher_order_ran = account.take
        self._record_of = record_of = self.recorder.record_of
        self.habits = Habits(files, self.callers, self.gradients, record_of, lambda tensor: self.device_of(tensor))
        self.dies.append(self.habits.gone)

    def _gone(self, record: Storage) -> None:
        for hear in self.dies:
            hear(record)

    def operation(self, func: OpOverload, args: Args, kwargs: Kwargs, out: Any, event: Event | None) -> None:
        """Take one operation that just ran."""
        for each in self.stale:
            each.clear()  # again and again: before Python 3.13 the next line that is traced fills it once more
        node = torch._C._current_autograd_node()
        if node is None:
            self._in_backward = False
        else:
            number = node._sequence_nr()
            self.forwards.ran(number)
            self.loops.ran(number)
        if event is None:
            if node is None:
                self._nodes = nodes_so_far()
                self._take_view(func, out)
        else:
            self._take_event(func, args, kwargs, out, event, node)
        if self.updates.watches:
            self.updates.ran(func, args, kwargs, event, backward=node is not None)

    def launched(self, name: str, args: Args, kwargs: Kwargs) -> None:
        """Take the launch of a kernel that the program brings itself."""
        event = record_launch(self.recorder, name, args, kwargs)
        self.account.take(event)
        self.uncounted.setdefault(name, event.facts["line"])

    def _take_event(self, func: OpOverload, args: Args, kwargs: Kwargs, out: Any, event: Event, node: Any) -> None:
        before = self.account.live
        line = self.account.take(event)
        crossed = copies.DEVICE if self.after(args, kwargs, event) else ""
        if event.allocated and not self.syncs.accelerated:
            self.syncs.accelerated = any(not self.device_of(each).startswith("cpu") for each in tensors_in(out))
        self.habits.launched += self.syncs.accelerated
        facts = event.facts
        name = facts["name"]
        if facts["kind"] == "unknown" and facts["line"]:
            self.uncounted.setdefault(name, facts["line"])
        if node is not None:
            self._ran_backward(event, line)
            if self.gradients.watches and node.name().endswith("AccumulateGrad"):
                self.gradients.accumulated(self._record_of(args[0]), self._backward_line)
        elif torch.is_grad_enabled():
            self.graph.made(event.allocated, out)
            now = nodes_so_far()
            if now > self._nodes and facts["kind"] in HEAVY:
                self.forwards.made(now - 1, self.callers.chain(), facts["flops"], before, self.account.live)
            self._nodes = now
        if self.conversions.watches and func._schema.is_mutable:
            for tensor in tensors_in(args[:1]):
                self.conversions.written(self._record_of(tensor))
        if node is None:
            if func._schema.is_mutable and name.endswith(("mul_", "div_")) and not tensors_in(args[1:]):
                self.habits.scaled()
            if self.gradients.watches and func._schema.is_mutable:
                self._take_written(name, args)
            if name in SYNCHRONIZING or (name == "index" and _by_mask(args)):
                self.synchronized(name, tensors_in(args))
        self._take_copy(func, name, args, kwargs, out, event, line, crossed, backward=node is not None)
        if self._shapes and node is None:
            copied = bool(copies.why_copied(func, name, args, kwargs, out))
            self._show(line, name, "in place" if func._schema.is_mutable else COPY if copied else "", out)

    @property
    def peak_nbytes(self) -> int:
        """The most bytes live at once, with those that were live before the program."""
        return self.account.most + sum(int(storage.nbytes) for storage in self.recorder.storages.there_before)

    def tally(self) -> Tally:
        """What was done so far, and what is there now."""
        self.account.settle()
        total = self.account.total
        return Tally(total.flops, total.read + total.written, self.account.live, nodes_so_far(), self.graph.steps)

    def _take_view(self, func: OpOverload, out: Any) -> None:
        at = self.lines.here() if isinstance(out, (Tensor, list, tuple)) else ""
        if not at:
            return
        line = self.account.of(at)
        name = func._schema.name.split("::")[1]
        line.views[name.lstrip("_")] += 1
        if self._shapes:
            self._show(line, name, VIEW, out)

    def _ran_backward(self, event: Event, line: LineAccount) -> None:
        if not self._in_backward:
            self._in_backward = True
            caller = self.callers.now()
            self._backward_line = caller.at if caller is not None else ""
            self.habits.backward(torch._C._current_autograd_node(), caller)
        caller_line = self.account.of(self._backward_line, changed=True)
        if caller_line.ran_backward is None:
            caller_line.ran_backward = Work()
        facts = event.facts
        if facts["line"] != self._backward_line:
            allocated = sum(record.nbytes for record in event.allocated)
            caller_line.ran_backward.add(facts["flops"], facts["read"], facts["written"], allocated)
            caller_line.ran_lines.add(facts["line"])

    def _take_written(self, name: str, args: Args) -> None:
        # A gradient that the user writes anew is no longer the one that a step used.
        clears = name in ("zero_", "_foreach_zero_", "copy_", "_foreach_copy_")
        clears = clears or (name == "fill_" and len(args) > 1 and not isinstance(args[1], Tensor) and args[1] == 0)
        if not clears and name not in ("mul_", "div_"):
            return
        written = [self._record_of(tensor) for tensor in tensors_in(args[0])]
        known = [storage for storage in written if storage is not None and self.gradients.used(storage)]
        if not known:
            return
        caller = None if clears else self.callers.now()
        if clears or (caller is not None and not caller.inside):
            self.gradients.cleared(known)

    def _take_copy(
        self,
        func: OpOverload,
        name: str,
        args: Args,
        kwargs: Kwargs,
        out: Any,
        event: Event,
        line: LineAccount,
        crossed: str,
        *,
        backward: bool,
    ) -> None:
        if not isinstance(out, Tensor):
            return
        if not backward:
            self.broadcasts.take(event, args, out, self.callers)
        why = crossed or copies.why_copied(func, name, args, kwargs, out)
        if name in copies.LOSSES:
            self.conversions.reached_loss([self._record_of(tensor) for tensor in tensors_in(args)])
        if not why:
            return
        caller: Caller | None = None if backward else self.callers.now()
        expression, inside = (caller.expression, caller.inside) if caller is not None else ("", "")
        source = tensors_in(args)[0]
        line.copies.count(why, event.facts["line"], source, out, expression, inside, backward)
        if not backward and event.allocated:
            record, made = self._record_of(source), event.allocated[0]
            if why == copies.DTYPE and not inside:
                self.conversions.converted(record, made, source, out, event.facts["line"], expression)
            self.conversions.copied(record, made, why, source, out, event.facts["line"], expression)

    def synchronized(self, name: str, tensors: list[Tensor], device: str = "cpu") -> None:
        """The program waits for a value of a tensor, or for a device."""
        self.habits.waited += 1
        caller = self.callers.now()
        if caller is not None and not caller.inside.startswith("torch.optim") and not _loads_data(caller.frame):
            device = next((self.device_of(tensor) for tensor in tensors), device)
            self.syncs.take(caller, name, device, self.graph.steps)

    def _show(self, line: LineAccount, name: str, kind: str, out: Any) -> None:
        if len(line.shown) >= MOST_SHOWN:
            return
        for tensor in tensors_in(out)[:2]:
            place = dtype_name(tensor.dtype), self.device_of(tensor), tensor.is_contiguous()
            line.shown.setdefault(Shown(name.strip("_"), kind, tuple(tensor.shape), tuple(tensor.stride()), *place))


def _loads_data(frame: FrameType | None) -> bool:
    # A loader that makes a batch works on tensors of the host, and nothing waits for them.
    while frame is not None and not frame.f_code.co_filename.startswith(_LOADERS):
        frame = frame.f_back
    return frame is not None


def _by_mask(args: Args) -> bool:
    # How many elements a mask picks must be counted first, for which the host waits.
    return any(tensor.dtype in (torch.bool, torch.uint8) for tensor in tensors_in(args[1]))


_KEPT = 8  # steps whose nodes may still be run backward
LEAST_OUTLIVING = 3 / 100  # of the most that is live
_MOST_ASKED = 8  # tensors that are asked who holds them


class Steps:
    """Follows the optimizers of a program, whichever it makes; a program that makes none is followed by its writes."""

    def __init__(self, watcher: Watcher, files: Files, most: int | None) -> None:
        self.taken = 0
        self.in_step = False
        self.holder: Holder | None = None
        self.decided: Counter[str] = Counter()  # conditions on unknown values since the last step
        self._watcher, self._files, self._most = watcher, files, most
        self._stale: list[dict[str, Any]] = []
        watcher.updates.on_write, watcher.updates.over = self._written, self._enough

    @contextmanager
    def followed(self) -> Iterator[None]:
        """While inside, each optimizer's step is followed."""
        hooks = [
            optimizers.register_optimizer_step_pre_hook(self._before),
            optimizers.register_optimizer_step_post_hook(self._after),
        ]
        try:
            with ExitStack() as stack:
                stack.enter_context(replaced(torch.optim.Optimizer, "__init__", self._making))
                yield
        finally:
            for hook in hooks:
                hook.remove()

    def _making(self, before: Callable[..., None]) -> Callable[..., None]:
        # From the first optimizer on what else the program writes to parameters is no step (averages, clipping).

        @functools.wraps(before)
        def made(*args: Any, **kwargs: Any) -> None:
            self._watcher.updates.on_write = None
            before(*args, **kwargs)

        return made

    def _before(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self._watcher.updates.on_write = None
        self._watcher.habits.step()
        self._forget_frames()
        self._use(self._gradients(optimizer), self.taken)
        self.in_step = True

    def _after(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if not self.in_step:
            # It began before it was followed
            return
        self.in_step = False
        self._watcher.gradients.after_step(self._gradients(optimizer))
        self.end_step()
        self._enough()

    def _gradients(self, optimizer: torch.optim.Optimizer) -> list[Storage]:
        parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
        return gradients_of(parameters, self._watcher.recorder.record_of)

    def _written(self, gradients: list[Storage], begins: bool) -> None:
        """The program writes parameters by these gradients; ``begins`` with the first write since a backward."""
        if begins:
            self._watcher.habits.step()
            self._forget_frames()
        self._use(gradients, self.taken if begins else self.taken - 1)
        self._watcher.gradients.after_step(gradients)
        if begins:
            self.end_step()

    def _enough(self) -> None:
        """End the program where it has taken as many steps as were asked for."""
        if self._most is not None and self.taken >= self._most:
            raise script.EnoughSteps(f"stopped after {self.taken:,} optimizer steps, as asked")

    def _forget_frames(self) -> None:
        for each in self._stale:
            each.clear()
        self._stale = []

    def _use(self, gradients: list[Storage], step: int) -> None:
        caller = self._watcher.callers.now()
        at = caller.at if caller is not None else "a library"
        self._watcher.gradients.before_step(gradients, at, step)

    def _named(self, records: set[Storage]) -> Named:
        caller = self._watcher.callers.now()
        frame = None if caller is None else caller.frame
        record_of = self._watcher.recorder.record_of
        named = {
            record: (name, at)
            for name, tensor, at in names_of(frame, self._files)
            if (record := record_of(tensor)) in records and tensor.requires_grad  # not a batch, which data is
        }
        self._watcher.stale = snapshots(frame, self._files)
        return named

    def end_step(self) -> None:
        """A step is over: look at what it leaves behind."""
        graph = self._watcher.graph
        self.taken += 1
        self.decided.clear()
        self._watcher.account.settle()
        least = LEAST_OUTLIVING * self._watcher.peak_nbytes
        self._watcher.outliving.end_step(self._watcher.recorder.storages.live.values(), least, self._named)
        if self.taken % _KEPT == 0:
            self._watcher.recorder.attribution.forget_before(graph.number_before(_KEPT))
            self._watcher.forwards.settle(graph.number_before(_KEPT))
        if not graph.end_step() or graph.leaks is None:
            return
        caller = self._watcher.callers.now()
        if caller is None or (self.holder is not None and self.holder.line):
            return
        for _, ref in graph.looks[-1].tensors[:_MOST_ASKED]:
            tensor = ref()
            if tensor is not None:
                self.holder = holder_of(tensor, caller.frame, self._files) or self.holder
                if self.holder is not None and self.holder.line:
                    break
        self._stale = snapshots(caller.frame, self._files)

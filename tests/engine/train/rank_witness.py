"""One rank of a real run: trains a few steps of each case and writes down what the last one held and sent.

Started by test_parallel_ranks.py, once for each rank: python rank_witness.py CASES.json RANK OUT.json
"""

from __future__ import annotations

import gc
import json
import sys
import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from gathering_again import spread_gathering
from torch import Tensor, nn
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.utils._python_dispatch import TorchDispatchMode

from trainledger.answers.load import load
from trainledger.engine.nn.init import draw
from trainledger.engine.nn.transformer import Transformer
from trainledger.engine.train.parallel.context import spread_tokens
from trainledger.engine.train.parallel.data_parallel import ShardedUpdate
from trainledger.engine.train.parallel.mesh import data_rank, mesh_of
from trainledger.engine.train.parallel.model_on_rank import RanksTogether, optimizer_on_rank, reference_on_rank
from trainledger.engine.train.precision import build_model, stepped
from trainledger.engine.train.step import optimizer_step
from trainledger.spec.run import Run

FUNCTIONAL = {"all_reduce": "all_reduce", "all_gather_into_tensor": "all_gather",
              "reduce_scatter_tensor": "reduce_scatter"}  # fmt: skip
IN_PLACE = {"_allgather_base_": "all_gather", "_reduce_scatter_base_": "reduce_scatter", "allreduce_": "all_reduce",
            "allgather_into_tensor_coalesced_": "all_gather", "reduce_scatter_tensor_coalesced_": "reduce_scatter",
            "allreduce_coalesced_": "all_reduce", "alltoall_base_": "all_to_all", "recv_": "recv"}  # fmt: skip
UNSEEN = ("wait_tensor", "_wrap_tensor_autograd", "barrier")


def tensors_in(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, list | tuple):
        return [tensor for each in value for tensor in tensors_in(each)]
    return []


def nbytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


class Witness(TorchDispatchMode):
    """Counts collectives by phase, kind, payload and ranks, and follows the live bytes of every storage."""

    def __init__(self) -> None:
        super().__init__()
        self.phase = "other"
        self.collectives: Counter[tuple[str, str, int, int]] = Counter()
        self.live = self.peak = 0
        self._sizes: dict[int, int] = {}
        self._guards: dict[int, Any] = {}
        self.buckets: list[Tensor] = []

    def resident(self, tensors: list[Tensor]) -> None:
        for each in tensors:
            self._see(each)

    def _see(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._sizes:
            self._sizes[key] = 0
            self._guards[key] = weakref.ref(storage, lambda _: self._gone(key))
            self._size(key, storage.nbytes())

    def _size(self, key: int, size: int) -> None:
        self.live += size - self._sizes[key]
        self._sizes[key] = size
        self.peak = max(self.peak, self.live)

    def _gone(self, key: int) -> None:
        self.live -= self._sizes.pop(key)
        del self._guards[key]

    @contextmanager
    def following_resizes(self) -> Iterator[None]:
        """FSDP2 frees what it has gathered by making its storage empty."""
        resize = torch.UntypedStorage.resize_

        def seen(storage: Any, size: int) -> Any:
            done = resize(storage, size)
            if storage._cdata in self._sizes:
                self._size(storage._cdata, storage.nbytes())
            return done

        torch.UntypedStorage.resize_ = seen
        try:
            yield
        finally:
            torch.UntypedStorage.resize_ = resize

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(hasattr(each, "__tensor_flatten__") for each in types):
            return NotImplemented
        out = func(*args, **(kwargs or {}))
        for each in tensors_in(out):
            if not hasattr(each, "__tensor_flatten__") and not each.is_meta:  # neither has memory of its own
                self._see(each)
        space, name = func._schema.name.split("::")
        if "c10d" in space and name not in UNSEEN:
            self._collective(name, args, out)
        return out

    def _collective(self, name: str, args: Any, out: Any) -> None:
        if name in FUNCTIONAL:
            kind, size = FUNCTIONAL[name], _resolve_process_group(args[-1]).size()
            payload = nbytes(out if kind == "all_gather" else args[0])
        else:
            kind = IN_PLACE.get(name, name)
            group = next(
                each for each in args if isinstance(each, torch.ScriptObject) and "ProcessGroup" in str(each._type())
            )
            size = dist.ProcessGroup.unbox(group).size()
            if name == "allreduce_" and self.phase == "backward":
                self.buckets += tensors_in(args[0])
            payload = sum(
                nbytes(each) for each in tensors_in(args[1 if kind in ("reduce_scatter", "all_to_all") else 0])
            )
        self.collectives[self.phase, kind, payload, size] += 1


def model_of(run: Run, *, peft: bool = False) -> Transformer:
    """The whole model of a run, before it is spread; FSDP2 makes copies in low precision, ``peft`` adapters."""
    model = build_model(run.model, run.recipe, adapted=not peft, sharded=True)
    if peft and run.recipe.lora is not None:
        from peft import LoraConfig, inject_adapter_in_model

        lora = run.recipe.lora
        config = LoraConfig(r=lora.rank, target_modules="all-linear", use_dora=lora.dora)
        inject_adapter_in_model(config, model.layers)
        for each in (model.embed_tokens, model.norm, model.lm_head):
            each.requires_grad_(False)
    draw(model, seed=0)
    return model


def run_case(run: Run, rank: int, *, peft: bool = False) -> dict[str, Any]:
    """Some steps of a run on this rank; facts of the last one, and the lower peak of the last two."""
    layout = run.layout
    torch.manual_seed(0)
    model: nn.Module = model_of(run, peft=peft)
    mesh = mesh_of(layout)
    if layout.context > 1:
        spread_tokens(model, layout, mesh, run.recipe.seq_len)
    model, again = spread_gathering(model, layout, mesh, run.recipe.precision)
    update = ShardedUpdate(model, layout, mesh) if layout.shard_ranks > 1 and layout.zero < 3 else None
    if (beside := run.reference) is not None:
        whole: Any = model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model
        reference_on_rank(beside, whole, mesh, torch.device("cpu"))
    together = RanksTogether(layout, mesh, update=update)
    optimizer = optimizer_on_rank(model, run.recipe, together)
    losses, peaks = [], []
    witness = Witness()
    for step in range(4):
        # DDP makes its buckets in C++, unseen before they are sent, and keeps them from the second step on.
        buckets = witness.buckets if isinstance(model, nn.parallel.DistributedDataParallel) and step > 1 else []
        witness = Witness()
        witness.resident(buckets)
        batches = [together.own(each) for each in batches_of(run, step, data_rank(layout, mesh))]

        @contextmanager
        def clock(phase: str, witness: Witness = witness) -> Iterator[None]:
            witness.phase = phase
            yield

        optimizer.zero_grad(set_to_none=True)
        gc.collect()  # what earlier steps left in cycles is not this one's
        witness.resident([local(each) for each in model.parameters()])
        witness.resident(list(model.buffers()))
        witness.resident([each for state in optimizer.state.values() for each in map(local, state.values())])
        witness.resident([each for pair in batches for each in pair])
        with witness.following_resizes(), witness, again():
            result = optimizer_step(model, optimizer, batches, run.recipe, clock=clock, together=together)
        loss = result.loss.full_tensor() if hasattr(result.loss, "full_tensor") else result.loss
        losses.append(loss.item())
        peaks.append(witness.peak)
    return {
        "losses": losses,
        "peak": min(peaks[-2:]),
        "collectives": sorted([*key, times] for key, times in witness.collectives.items()),
        "parameters": storage_nbytes([local(each) for each in model.parameters()]),
        "elements": sum(local(each).numel() for each in model.parameters() if each.requires_grad),
        "gradients": sum(nbytes(local(each.grad)) for each in stepped(model, optimizer) if each.grad is not None),
        "optimizer state": sum(nbytes(local(v)) for state in optimizer.state.values() for v in state.values()),
    }


def storage_nbytes(tensors: list[Tensor]) -> int:
    """Bytes of the storages that tensors lie in, each counted once."""
    return sum({each.untyped_storage()._cdata: each.untyped_storage().nbytes() for each in tensors}.values())


def batches_of(run: Run, step: int, data_rank: int) -> list[tuple[Tensor, ...]]:
    """The data rank's micro-batches of the step's tokens, and losses where a reference is precomputed."""
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(0, run.model.vocab_size, (run.recipe.global_batch, run.recipe.seq_len + 1), generator=generator)
    rows = run.device_batch * run.grad_accum
    own = ids[data_rank * rows : (data_rank + 1) * rows].split(run.device_batch)
    known = [torch.ones(run.device_batch)] if run.recipe.objective.reference == "precomputed" else []
    return [(each[:, :-1].contiguous(), each[:, 1:].contiguous(), *known) for each in own]


def main(cases: str, rank: str, out: str) -> None:
    """Run every case; ranks meet in a file next to the cases."""
    torch.set_num_threads(1)
    told = json.loads(Path(cases).read_text())
    if told["fake"]:  # collectives that do nothing, in a world of any size
        from torch.testing._internal.distributed.fake_pg import FakeStore

        dist.init_process_group("fake", store=FakeStore(), rank=int(rank), world_size=told["world"])
    else:
        where = f"file://{Path(cases).resolve()}.meet"
        dist.init_process_group("gloo", init_method=where, rank=int(rank), world_size=told["world"])
    facts = {name: run_case(load(run), int(rank), peft=told["peft"]) for name, run in told["cases"].items()}
    Path(out).write_text(json.dumps(facts))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])

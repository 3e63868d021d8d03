"""Host memory of a run: of a process and of a node, in a step, while a model is loaded and while it is saved."""

from __future__ import annotations

from trainledger.ledger.entry import HOST, Amounts, in_any_memory
from trainledger.ledger.memory.timeline import peak_on_host
from trainledger.ledger.parallel.fully_sharded import formats
from trainledger.ledger.parallel.rank_plan import RankPlan
from trainledger.ledger.ranks import RunAccount
from trainledger.spec.dtypes import nbytes_in
from trainledger.spec.frozen import frozen
from trainledger.spec.precision import Precision

_ROUNDING = "rounding of pinned memory"


@frozen
class HostMemory:
    """Bytes in host memory, without those of the program itself: PyTorch, CUDA's context, data loaders.

    ``parts`` are those of a process at the moment of a step at which it has most there; ``staged`` is its copy of a
    checkpoint that is written while training goes on. ``model`` is the whole model as a process reads it, ``processes``
    are those of a node. ``usable`` is the node's memory (None: not known).
    """

    parts: Amounts
    staged: int
    model: int
    processes: int
    usable: int | None

    @property
    def process(self) -> int:
        """The most bytes of a process in training."""
        return self.staged + sum(int(nbytes) for _, nbytes in self.parts)

    @property
    def node(self) -> int:
        """The most bytes of a node in training."""
        return self.processes * self.process

    @property
    def loading(self) -> int:
        """Bytes of a node whose processes each read the whole model, as `from_pretrained` does outside of zero.Init."""
        return self.processes * self.model

    @property
    def fits(self) -> bool | None:
        """The node has as much memory as training takes; None where its memory is not known."""
        return None if self.usable is None else self.node <= self.usable


def host_memory(account: RunAccount, devices_per_node: int) -> HostMemory | None:
    """What a run holds in host memory; None where nothing is offloaded and no memory of a host is given.

    Of ranks that differ the one with most counts for all.
    """
    run = account.run
    ledgers = [rank.ledger for rank in account.ranks] or [account.ledger]
    most = max((peak_on_host(ledger) for ledger in ledgers), key=lambda live: sum(live.values()))
    if not most and run.cluster.host_memory_nbytes is None:
        return None
    parts = {name.removeprefix(f"{HOST} "): nbytes for name, nbytes in most.items()}
    if HOST in parts:
        kept = "saved activations" if run.recipe.activation_checkpointing.kind == "offload" else "temporaries"
        parts[kept] = parts.pop(HOST)
    if run.recipe.offload == "parameters" and account.ranks:
        parts[_ROUNDING] = _rounding(account.ranks[0].plan)
    if run.recipe.offload == "optimizer":
        owned = int(account.ranks[0].plan.owned.trained().elements) if account.ranks else account.ledger.parameters
        parts[_ROUNDING] = sum(map(_rounded_up, _flat_buffers(owned, run.recipe.precision)))
    state = in_any_memory(ledgers[0].resident)
    staged = state.get("parameters", 0) + state.get("optimizer state", 0)
    return HostMemory(
        parts=tuple(sorted(parts.items(), key=lambda part: -part[1])),
        staged=staged if run.recipe.checkpoints.asynchronous else 0,
        model=nbytes_in(account.parameters.total, run.recipe.precision.parameters),
        processes=min(run.layout.devices, devices_per_node),
        usable=run.cluster.host_memory_nbytes,
    )


def _rounding(plan: RankPlan) -> int:
    """What pinned pieces of parameters and of their gradients take more than their bytes: each is rounded up to a
    power of two (torch 2.13, ATen/core/CachingHostAllocator.h)."""
    more, gradients = 0, plan.run.recipe.precision.gradients
    for pattern, count in (rows for chunk in plan.chunks for rows in chunk.leaves.in_order()):
        for leaf in pattern:
            sizes = [nbytes_in(plan.piece(part), dtype) for part, dtype, _ in formats(leaf, plan.run.recipe)]
            sizes += [nbytes_in(plan.piece(leaf), gradients)] if leaf.trained else []
            more += count * sum(map(_rounded_up, sizes))
    return more


# DeepSpeed 02aa38c3, zero/stage_1_and_2.py, with pin_memory = true (as in the files of LLaMA-Factory and Transformers):
# a flat buffer of fp32 weights and one of fp32 gradients; of a model in 16 bits also one in 16 bits. Moments are not
# pinned.
def _flat_buffers(elements: int, precision: Precision) -> list[int]:
    """Bytes of what an optimizer on the host pins of so many elements."""
    whole, low = 4 * elements, nbytes_in(elements, precision.gradients)
    return [whole, whole, *([low] if low < whole else ())]


def _rounded_up(nbytes: int) -> int:
    """What pinned memory of so many bytes takes more."""
    return (1 << (nbytes - 1).bit_length()) - nbytes if nbytes else 0

"""The layout: how a model and its batch are divided among devices."""

from __future__ import annotations

from typing import Any

from trainledger.spec.frozen import frozen
from trainledger.spec.setting import setting

AXES = ("replicate", "shard", "context", "tensor", "pipeline")  # of the mesh: their product is its devices
NOT_SEARCHED = ("gather", "stage_layers", "expert_tensor")  # fields that a search for a layout cannot keep
SCHEDULES = ("1f1b", "gpipe", "interleaved", "zero-bubble")
GATHERS = ("block", "tensor")
CONTEXT_KINDS = ("ring", "all-to-all")
SEQUENCE_GATHERS = ("kept", "again")
OVERLAPS = ("gradients", "parameters", "tensor", "input-gradients", "experts")
EXPERT_SENDS = ("copies", "nodes", "all")
_MOST = 10**7
MOST_CHUNKS = 1024  # of layers, in all stages together: each is accounted for separately


@frozen(kw_only=True)
class Layout:
    """Devices along each axis of the mesh, and how each axis is used; one device where all axes are 1.

    The devices are ``replicate x shard x context x tensor x pipeline``. Expert ranks are no axis of their
    own: they are ranks of ``shard x context``, as in torchtitan (Megatron-LM: of data parallelism; with
    ``expert_tensor`` of ``shard x context x tensor``). Parameters,
    gradients and optimizer state are sharded over ``shard x context`` ranks: context ranks see other tokens with
    the same weights (torchtitan: ``dp_shard_cp``).
    """

    auto: bool = setting(
        'true = search for a layout that fits the cluster: the simplest within 3 % of the quickest (layout = "auto" '
        "above all sections does the same); other fields given here, recipe.micro_batch and "
        "recipe.activation_checkpointing are kept",
        False,
    )
    replicate: int = setting(
        "copies of the model, each with its part of the batch (DDP, hybrid sharding)", 1, at_least=1, at_most=_MOST
    )
    shard: int = setting(
        "ranks that share parameters, gradients and optimizer state, each with its part of the batch (FSDP, ZeRO)",
        1,
        at_least=1,
        at_most=_MOST,
    )
    zero: int = setting(
        "what is sharded: 0 = nothing (Megatron-LM without its distributed optimizer), 1 = optimizer state, 2 = "
        "gradients too, 3 = parameters too (FSDP2)",
        3,
        at_least=0,
        at_most=3,
    )
    reshard_after_forward: bool | None = setting(
        "zero = 3: parameters of a block are freed after its forward and gathered again in backward; absent = true "
        "without a pipeline, false with one",
        None,
    )
    prefetch: int = setting("zero = 3: blocks gathered ahead of the running one, in backward", 1, at_least=0, at_most=8)
    gather: str = setting(
        "zero = 3: unit of a gather: a whole block (FSDP) or one tensor (DeepSpeed in 2021)", "block", choices=GATHERS
    )
    tensor: int = setting(
        "ranks that split heads and the inner size of the MLP (tensor parallelism)", 1, at_least=1, at_most=_MOST
    )
    sequence_parallel: bool = setting(
        "tensor ranks also split norms and the residual stream by tokens, and gather them for matmuls", False
    )
    sequence_gather: str = setting(
        "what sequence-parallel ranks save of a gathered input: kept = all tokens, as PyTorch's DTensor does; again = "
        "their own tokens, and backward gathers a second time (Megatron-LM)",
        "kept",
        choices=SEQUENCE_GATHERS,
    )
    pipeline: int = setting("pipeline stages", 1, at_least=1, at_most=MOST_CHUNKS)
    split_sends: bool = setting(
        "each tensor rank sends a part of an activation to the next stage, which gathers it (Megatron-LM's "
        "scatter-gather, DeepSpeed's pipe_partitioned); not with sequence_parallel, which sends parts anyway",
        False,
    )
    schedule: str = setting("order of micro-batches in a pipeline", "1f1b", choices=SCHEDULES)
    virtual_stages: int = setting(
        "chunks of layers on each rank of an interleaved pipeline", 1, at_least=1, at_most=MOST_CHUNKS
    )
    stage_layers: tuple[int, ...] | None = setting(
        "layers of each stage, in order; absent = the same in all", None, at_least=0, at_most=_MOST
    )
    context: int = setting(
        "ranks that split the tokens of a sequence (context parallelism)", 1, at_least=1, at_most=_MOST
    )
    context_kind: str = setting(
        "how context ranks attend to all tokens: ring = keys and values circulate, all-to-all = each rank computes a "
        "part of the heads for all tokens",
        "ring",
        choices=CONTEXT_KINDS,
    )
    expert: int = setting(
        "ranks that split the experts, among those of shard x context: no further devices", 1, at_least=1, at_most=_MOST
    )
    expert_tensor: int | None = setting(
        "ranks that split the inner size of an expert (Megatron-LM's expert tensor parallelism), with experts on ranks "
        "of shard x context x tensor; absent = those of tensor",
        None,
        at_least=1,
        at_most=_MOST,
    )
    expert_send: str = setting(
        "how tokens reach the ranks of their experts: copies = one per expert (all-to-all); nodes = one per node, "
        "copied there and summed there on the way back; dispatched in fp8 with precision fp8-block (DeepEP); all = "
        "every rank gathers the tokens of all (Megatron-LM's allgather)",
        "copies",
        choices=EXPERT_SENDS,
    )

    overlap: tuple[str, ...] | None = setting(
        "communication that overlaps with compute, besides that of fully sharded blocks: gradients = their sum over "
        "replicas (or zero = 1) with the last backward; parameters = their gather (zero = 1 or 2) with the next "
        "forward; tensor = communication of tensor ranks with matmuls cut into parts (Megatron-LM's tp-comm-overlap, "
        "PyTorch's async tensor parallelism); input-gradients = their sum over tensor ranks with the matmul of the "
        "weight's gradient (Megatron-LM since autumn 2021); experts = dispatch and combine with the compute of another "
        "micro-batch (DualPipe, Megatron Core); none = nothing, not even that of sharded blocks",
        ("gradients",),
    )

    @property
    def devices(self) -> Any:
        """Devices of the mesh."""
        return self.replicate * self.shard * self.context * self.tensor * self.pipeline

    @property
    def data_ranks(self) -> Any:
        """Ranks with different sequences."""
        return self.replicate * self.shard

    @property
    def shard_ranks(self) -> Any:
        """Ranks over which parameters, gradients or optimizer state are sharded."""
        return self.shard * self.context if self.zero else 1

    @property
    def replicas(self) -> Any:
        """Ranks that hold the same pieces of parameters and state, experts apart."""
        return self.replicate if self.zero else self.replicate * self.shard * self.context

    @property
    def splits_expert(self) -> Any:
        """Ranks that split the inner size of an expert."""
        return self.tensor if self.expert_tensor is None else self.expert_tensor

    @property
    def expert_replicas(self) -> Any:
        """Ranks of shard x context x tensor that have the same part of the same experts."""
        return self.shard * self.context * self.tensor // (self.splits_expert * self.expert)

    @property
    def folds(self) -> bool:
        """Expert ranks are not among those of shard x context alone."""
        return self.expert_tensor is not None and self.expert_tensor != self.tensor

    @property
    def communicators(self) -> tuple[int, ...]:
        """Sizes of the process groups of a rank: one for each axis above 1, and one of all ranks."""
        axes = (self.replicas, self.shard_ranks, self.tensor, self.pipeline, self.context, self.expert, self.devices)
        return tuple(size for size in axes if size > 1)

    @property
    def kinds_of_ranks(self) -> int:
        """The number of kinds of parallelism besides data parallelism; uneven stages count as one more.

        >>> Layout(shard=64).kinds_of_ranks, Layout(shard=8, tensor=8, pipeline=4).kinds_of_ranks
        (0, 2)
        """
        sizes = (self.tensor, self.context, self.expert, self.pipeline)
        return sum(size > 1 for size in sizes) + (self.stage_layers is not None)

    @property
    def alone(self) -> bool:
        """It is one device; False where a size is an array, and before the search of ``auto``."""
        return is_int(self.devices) and self.devices == 1 and not self.auto

    @property
    def sends_whole(self) -> bool:
        """All tensor ranks have the whole activation for the next stage, so that each may send a part."""
        return self.tensor > 1 and self.pipeline > 1 and not self.sequence_parallel

    @property
    def gathers_again(self) -> bool:
        """Only the rank's own tokens of a gathered matmul input are saved."""
        return self.sequence_parallel and self.sequence_gather == "again"

    @property
    def sends_to_nodes(self) -> bool:
        """A token goes once to each node that has experts of it."""
        return self.expert_send == "nodes" and not (is_int(self.expert) and self.expert == 1)

    @property
    def reshards(self) -> bool:
        """Gathered parameters are freed between forward and backward."""
        if self.reshard_after_forward is not None:
            return self.reshard_after_forward
        return is_int(self.pipeline) and self.pipeline == 1


def overlaps(layout: Layout, what: str) -> bool:
    """One of OVERLAPS overlaps with compute."""
    return what in (layout.overlap or ())


def is_int(size: Any) -> bool:
    """A size is one number, neither an array nor a symbol."""
    return isinstance(size, int)

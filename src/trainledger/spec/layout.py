"""The layout: how one model and its batch are spread over devices."""

from __future__ import annotations

from typing import Any

from trainledger.frozen import frozen
from trainledger.spec.setting import setting

SCHEDULES = ("1f1b", "gpipe", "interleaved", "zero-bubble")
GATHERS = ("block", "tensor")
CONTEXT_KINDS = ("ring", "all-to-all")
SEQUENCE_GATHERS = ("kept", "again")
OVERLAPS = ("gradients", "parameters", "tensor", "input-gradients", "experts")
EXPERT_SENDS = ("copies", "nodes")
_MOST = 10**7
MOST_CHUNKS = 1024  # of layers, in all stages together: each is followed on its own


@frozen(kw_only=True)
class Layout:
    """Devices along each axis of the mesh, and how each axis is used; all of them one: a device on its own.

    The devices are ``replicate x shard x context x tensor x pipeline``. Expert ranks are not devices of their own:
    they are taken from ``shard x context``, as torchtitan takes them from its data-parallel shard and context axes
    (Megatron-LM: from data parallelism). Parameters, gradients and optimizer state are sharded over ``shard x context``
    ranks, because context ranks see other tokens with the same weights (torchtitan: ``dp_shard_cp``).
    """

    auto: bool = setting(
        "true = search for a layout that fits the cluster: of those within 3 % of the quickest the simplest (layout = "
        "\"auto\" above all sections, in place of this one, says so too); what is given beside it, recipe.micro_batch "
        "and recipe.activation_checkpointing too, is kept",
        quantity="flag", default=False,
    )  # fmt: skip
    replicate: int = setting(
        "copies of the model, each with its part of the batch (DDP, hybrid sharding)", default=1, at_least=1,
        at_most=_MOST,
    )  # fmt: skip
    shard: int = setting(
        "ranks that share parameters, gradients and optimizer state, each with its part of the batch (FSDP, ZeRO)",
        default=1, at_least=1, at_most=_MOST,
    )  # fmt: skip
    zero: int = setting(
        "what is sharded: 1 = optimizer state, 2 = gradients too, 3 = parameters too (FSDP2)", default=3, at_least=1,
        at_most=3,
    )  # fmt: skip
    reshard_after_forward: bool | None = setting(
        "zero = 3: parameters of a block are let go after its forward and gathered again; absent = yes, but no in a "
        "pipeline",
        quantity="flag", default=None,
    )  # fmt: skip
    prefetch: int = setting(
        "zero = 3: blocks that are gathered ahead of the one that runs, in backward", default=1, at_least=0, at_most=8
    )
    gather: str = setting(
        "zero = 3: what is gathered at a time, a whole block (FSDP) or one tensor after the other (DeepSpeed in 2021)",
        quantity="text", default="block", choices=GATHERS,
    )  # fmt: skip
    tensor: int = setting(
        "ranks that split heads and the inner width of each block", default=1, at_least=1, at_most=_MOST
    )
    sequence_parallel: bool = setting(
        "tensor ranks split norms and the residual stream by tokens too, and gather them for products",
        quantity="flag", default=False,
    )  # fmt: skip
    sequence_gather: str = setting(
        "what sequence-parallel ranks gather for products: kept = whole for backward, as PyTorch's DTensor does; "
        "again = each keeps its own tokens, and backward gathers them a second time (Megatron-LM)",
        quantity="text", default="kept", choices=SEQUENCE_GATHERS,
    )  # fmt: skip
    pipeline: int = setting("stages of layers", default=1, at_least=1, at_most=MOST_CHUNKS)
    split_sends: bool = setting(
        "each tensor rank sends its part of an activation to the next stage, where they gather it (Megatron-LM's "
        "scatter-gather, DeepSpeed's pipe_partitioned); not with sequence_parallel, whose ranks have only their part",
        quantity="flag", default=False,
    )  # fmt: skip
    schedule: str = setting("order of micro-batches in a pipeline", quantity="text", default="1f1b", choices=SCHEDULES)
    virtual_stages: int = setting(
        "chunks of layers on each rank of an interleaved pipeline", default=1, at_least=1, at_most=MOST_CHUNKS
    )
    stage_layers: tuple[int, ...] | None = setting(
        "layers of each stage, in order; absent = the same in all", quantity="counts", default=None, at_least=0,
        at_most=_MOST,
    )  # fmt: skip
    context: int = setting("ranks that split the tokens of a sequence", default=1, at_least=1, at_most=_MOST)
    context_kind: str = setting(
        "how context ranks attend to each other's tokens: ring = keys and values go round, "
        "all-to-all = each attends to all tokens for a part of the heads",
        quantity="text", default="ring", choices=CONTEXT_KINDS,
    )  # fmt: skip
    expert: int = setting(
        "ranks that split the experts; taken from shard x context, no devices of their own", default=1, at_least=1,
        at_most=_MOST,
    )  # fmt: skip
    expert_send: str = setting(
        "how tokens go to the ranks of their experts: copies = one to each expert (all-to-all), nodes = one to each "
        "node, copied there and added up there on the way back; with precision fp8-block out in 8 bits (DeepEP)",
        quantity="text", default="copies", choices=EXPERT_SENDS,
    )  # fmt: skip

    overlap: tuple[str, ...] | None = setting(
        "what, besides the gathers and sums of fully sharded blocks, runs beside compute: gradients = their sum over "
        "replicas, or zero = 1, beside the last backward; parameters = zero = 1 or 2, gathered beside the next "
        "forward; tensor = products of tensor ranks in parts, each beside the next one's way (Megatron-LM's "
        "tp-comm-overlap, PyTorch's async tensor parallelism); input-gradients = sums of inputs' gradients over tensor "
        "ranks, each beside the product of the weight's gradient (Megatron-LM since autumn 2021); experts = tokens on "
        "their way to experts and back, beside another micro-batch that goes the other way (DualPipe, Megatron Core); "
        "none = nothing, those of sharded blocks neither",
        quantity="texts", default=("gradients",),
    )  # fmt: skip

    @property
    def devices(self) -> Any:
        """How many devices it takes."""
        return self.replicate * self.shard * self.context * self.tensor * self.pipeline

    @property
    def data_ranks(self) -> Any:
        """Ranks that get sequences of their own."""
        return self.replicate * self.shard

    @property
    def shard_ranks(self) -> Any:
        """Ranks over which parameters, gradients or optimizer state are sharded."""
        return self.shard * self.context

    @property
    def communicators(self) -> tuple[int, ...]:
        """The ranks of each group that a rank talks in: one group for each axis, and one of all for what is global."""
        axes = (self.replicate, self.shard_ranks, self.tensor, self.pipeline, self.context, self.expert, self.devices)
        return tuple(size for size in axes if size > 1)

    @property
    def kinds_of_ranks(self) -> int:
        """How many things ranks differ in beside their data: tensor, context, expert ranks, stages, uneven stages.

        >>> Layout(shard=64).kinds_of_ranks, Layout(shard=8, tensor=8, pipeline=4).kinds_of_ranks
        (0, 2)
        """
        sizes = (self.tensor, self.context, self.expert, self.pipeline)
        return sum(each > 1 for each in sizes) + (self.stage_layers is not None)

    @property
    def alone(self) -> bool:
        """Whether it is one device; never where a size is an array, nor before a layout was searched for."""
        return is_int(self.devices) and self.devices == 1 and not self.auto

    @property
    def sends_whole(self) -> bool:
        """Whether tensor ranks have the same activation to send to the next stage, so that each may send a part."""
        return self.tensor > 1 and self.pipeline > 1 and not self.sequence_parallel

    @property
    def gathers_again(self) -> bool:
        """Whether of what is gathered for a product only the rank's own tokens are kept for backward."""
        return self.sequence_parallel and self.sequence_gather == "again"

    @property
    def sends_to_nodes(self) -> bool:
        """Whether a token goes once to each node that has experts of it."""
        return self.expert_send == "nodes" and not (is_int(self.expert) and self.expert == 1)

    @property
    def reshards(self) -> bool:
        """Whether parameters are let go between forward and backward."""
        if self.reshard_after_forward is not None:
            return self.reshard_after_forward
        return is_int(self.pipeline) and self.pipeline == 1


def overlaps(layout: Layout, what: str) -> bool:
    """Whether one of OVERLAPS runs beside compute."""
    return what in (layout.overlap or ())


def is_int(size: Any) -> bool:
    """Whether a size is one number, neither an array nor a symbol."""
    return isinstance(size, int)

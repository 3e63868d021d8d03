"""What ranks exchange once in a step, when the last micro-batch's backward is over.

Sums of gradients that no backward has summed yet, the joint norm, and parameters that others have updated.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from trainledger.ledger.core.graph import Array, Leaf, ModelLeaves, Parameters, component_of
from trainledger.ledger.core.sizes import is_one, several
from trainledger.ledger.core.tape import Tape
from trainledger.ledger.entry import Group, Int
from trainledger.ledger.parallel.rank_plan import BY_ROWS, RankPlan
from trainledger.spec.dtypes import nbytes_in

FIRST_BUCKET_NBYTES, BUCKET_NBYTES = 2**20, 25 * 2**20  # torch.nn.parallel.DistributedDataParallel's defaults

# Held whole by every tensor rank, but each has worked with its own heads or experts only.
_OF_LATENTS = ("q_a_proj", "q_a_layernorm", "kv_a_proj_with_mqa", "kv_a_layernorm")
_OF_HEADS = ("q_norm", "k_norm", *_OF_LATENTS, "router", "shared_expert_gate")


def is_partial(leaf: Leaf, rank: RankPlan) -> bool:
    """Whether each tensor rank has only its share of this parameter's gradient: of its tokens, or of its heads."""
    layout = rank.layout
    if is_one(layout.tensor):
        return False
    module = leaf.path.split(".")
    if module[-1].startswith("lora_"):  # of layers by columns A is whole, of those by rows B and magnitudes
        return (module[-1] != "lora_a") == (module[-2] in BY_ROWS)
    if any(part in _OF_HEADS for part in module):
        return True
    return layout.sequence_parallel and component_of(leaf.path) == "norms"


def sharers_of(leaf: Leaf, rank: RankPlan) -> Group | None:
    """The tensor ranks that sum their gradients of a parameter that all of them hold; None where none do.

    Key-value heads that are fewer than the ranks are held by several of them.
    """
    tensor, kv = rank.layout.tensor, rank.whole.model.kv_heads
    if is_partial(leaf, rank):
        return Group("tensor", tensor)
    shared = isinstance(tensor, int) and tensor > kv and not rank.whole.model.latent
    if shared and any(part in ("k_proj", "v_proj") for part in leaf.path.split(".")):
        return Group("tensor / kv_heads", tensor // kv)
    return None


def sum_over_tensor(tape: Tape, rank: RankPlan, leaf: Leaf, dtype: str) -> None:
    """Sum over the tensor ranks the gradients of which each has a share."""
    group = sharers_of(leaf, rank)
    if group is not None:
        tape.all_reduce(group, Array(leaf.elements, dtype, None))


def sum_partial_gradients(tape: Tape, rank: RankPlan, leaves: ModelLeaves) -> None:
    """The same for all parameters, one after the other, where no reduction by blocks has done it."""
    with tape.during("backward"):
        for index, (pattern, count) in enumerate(leaves.in_order()):
            with tape.loop(f"layers {index}", count):
                for leaf in pattern:
                    if leaf.trained:
                        sum_over_tensor(tape, rank, leaf, tape.precision.gradients)


def sum_tied_embedding(tape: Tape, rank: RankPlan, leaves: ModelLeaves) -> None:
    """The first and the last stage have each a copy of a tied embedding, and its gradient is that of both.

    So they have of one that modules of the last stage read too.
    """
    spec = rank.whole.model
    if not spec.embeds_at_end or rank.layout.pipeline == 1:
        return
    for name in ("embed_tokens.weight", *(("lm_head.weight",) if spec.tie_embeddings else ())):
        leaf = {**leaves.before, **leaves.after}.get(name)
        if leaf is not None:
            gradient = Array(leaf.elements, tape.precision.gradients, None)
            with tape.during("backward"):
                tape.all_reduce(Group("first and last stage", 2), gradient)


def sum_over_replicas(tape: Tape, rank: RankPlan, leaves: ModelLeaves) -> None:
    """All gradients in buckets, as DDP sends them: overlapped with the backward that runs meanwhile."""
    dtype, layout = tape.precision.gradients, rank.layout
    if is_one(rank.replicas.ranks):
        return
    with tape.during("backward"):
        if layout.zero == 0 and rank.experts_apart:  # which have fewer replicas, in separate buffers
            of_experts = leaves.trained().among(lambda leaf: component_of(leaf.path) == "experts").elements
            others = Array(leaves.trained().elements - of_experts, dtype, None)
            tape.all_reduce(rank.replicas, others, overlap="compute")
            fewer = Group(f"{rank.group.axes} / expert", layout.replicate * layout.expert_replicas)
            tape.all_reduce(fewer, Array(of_experts, dtype, None), overlap="compute")
            return
        for elements, count in buckets(leaves, dtype):
            with tape.loop("buckets", count):
                tape.all_reduce(rank.replicas, Array(elements, dtype, None), overlap="compute")


def bucket_nbytes(rank: RankPlan, leaves: ModelLeaves, dtype: str) -> Int:
    """Bytes of DDP's buckets: as much as the gradients, which are copied there and back."""
    if rank.sharded or is_one(rank.replicas.ranks):
        return 0
    return nbytes_in(leaves.elements(), dtype) * several(rank.replicas.ranks)


def buckets(leaves: ModelLeaves, dtype: str) -> Iterator[tuple[Int, Int]]:
    """Elements of each of DDP's buckets, and how often a bucket of this size comes.

    Parameters go in from the last to the first until 25 MiB are full (the first bucket: 1 MiB). Where sizes are not
    numbers all gradients count as one bucket.
    """
    runs = list(leaves.in_order())
    if not all(isinstance(size, int) for pattern, n in runs for size in (n, *(leaf.elements for leaf in pattern))):
        yield leaves.elements(), 1
        return
    found: list[int] = []
    full, limit = 0, FIRST_BUCKET_NBYTES
    for each in (leaf for pattern, count in reversed(runs) for leaf in pattern[::-1] * count if leaf.trained):
        full += each.elements
        # reducer.hpp of torch 2.13: kDefaultFirstBucketBytes is 1 MiB, so that the first all-reduce starts early; the
        # others hold 25 MiB (_DEFAULT_BUCKET_CAP_MB).
        if nbytes_in(full, dtype) >= limit:
            found.append(full)
            full, limit = 0, BUCKET_NBYTES
    if full:
        found.append(full)
    for size in dict.fromkeys(found):
        yield size, found.count(size)


# ZeRO-1 and 2: each rank updates a part of every parameter


def scatter_gradients(tape: Tape, rank: RankPlan, leaves: ModelLeaves) -> None:
    """ZeRO-1: whole gradients are summed over the ranks where they are, each rank getting the part that it updates.

    Gradients that do not go evenly over the ranks are copied one by one to where there is more room.
    """
    dtype = tape.precision.gradients
    with tape.during("backward"):
        for group, some in rank.by_group(leaves):
            own = rank.pieces(some)
            if not is_one(group.ranks):
                # As many bytes as an all-reduce: one reduce-scatter here, one all-gather of what was updated
                # (Rajbhandari et al. 2020, section 7.2.1).
                flat, piece = Array(own * group.ranks, dtype, None), Array(own, dtype, None)
                tape.collective("reduce_scatter", group, flat.nbytes, reads=[flat], changes=[piece], overlap="compute")
            tape.all_reduce(rank.replicas, Array(own, dtype, None), overlap="compute")
        # After all sums, though it comes before: sums overlap the backward right before them.
        uneven = [(leaf, n) for _, some in rank.by_group(leaves) for leaf, n in some if _is_uneven(rank, leaf)]
        if uneven:
            copied = Array(sum(leaf.elements * n for leaf, n in uneven), dtype, None)
            most = Array(max(leaf.elements for leaf, _ in uneven), dtype, None)
            tape.emit("fill_up", "copy", reads=[copied], changes=[copied], scratch=most.nbytes)


def gather_updated(tape: Tape, rank: RankPlan, chunks: Sequence[ModelLeaves]) -> None:
    """ZeRO-1 and 2: every rank gets the parts that the others have updated, into the parameters."""
    dtype = tape.precision.parameters
    with tape.during("optimizer"):
        for group, some in rank.by_group(*chunks):
            own = rank.pieces(some)
            if not is_one(group.ranks):
                whole = Array(own * group.ranks, dtype, None)
                tape.collective("all_gather", group, whole.nbytes, reads=[Array(own, dtype, None)], changes=[whole])


def _is_uneven(rank: RankPlan, leaf: Leaf) -> bool:
    """Whether elements are known not to divide evenly among the ranks; sizes that are not numbers are assumed to."""
    filled = rank.piece(leaf) * rank.group_of(leaf).ranks
    return isinstance(filled, int) and filled != leaf.elements


# The joint norm


def sum_norms(tape: Tape, rank: RankPlan, leaves: ModelLeaves) -> None:
    """Each rank's norms of what it has, put together: once for each axis along which gradients are split.

    Those of pieces are summed tensor by tensor (DTensor), experts on ranks of their own apart from all else. Stages
    have other tensors, and each its joint norm by then.
    """
    layout, rest, tensor = rank.layout, leaves.trained(), Group("tensor", rank.layout.tensor)
    some: list[tuple[Parameters, tuple[Group, ...]]] = []
    if rank.experts_apart:
        experts = rest.among(lambda leaf: component_of(leaf.path) == "experts")
        rest = rest.among(lambda leaf: component_of(leaf.path) != "experts")
        some.append((experts, (rank.expert_group, Group("expert", layout.expert))))
    for parameters, groups in (*some, (rest, (rank.group, tensor))):
        for group in groups if not parameters.empty else ():  # of adapters one of both may be all
            tape.all_reduce(group, Array(parameters.tensors, "fp32", None))
    tape.all_reduce(Group("pipeline", layout.pipeline), Array(1, "fp32", None))

"""One real process of a program: python real_rank.py NAME[,NAME] RANK WORLD MEET OUT.json; what it held and sent."""

from __future__ import annotations

import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.optim import optimizer as optimizers

sys.path.insert(0, str(Path(__file__).parents[2] / "engine" / "train"))
from rank_witness import FUNCTIONAL, IN_PLACE, Witness, nbytes, tensors_in

NAMES = {**FUNCTIONAL, **IN_PLACE, "alltoall_base_": "all_to_all", "all_to_all_single": "all_to_all",
         "send": "send", "recv_": "recv", "broadcast_": "broadcast"}  # fmt: skip

STEPS = 8


class Ordered(Witness):
    """The same witness, which keeps the order of the collectives."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: list[tuple[str, str, int, int]] = []

    def _collective(self, name: str, args: Any, out: Any) -> None:
        groups = [each for each in args if isinstance(each, torch.ScriptObject) and "ProcessGroup" in str(each._type())]
        size = dist.ProcessGroup.unbox(groups[0]).size() if groups else _resolve_process_group(args[-1]).size()
        kind = NAMES.get(name, name)
        message = args[1] if name in ("_reduce_scatter_base_", "alltoall_base_") else args[0]
        payload = sum(nbytes(each) for each in tensors_in(out if name == "all_gather_into_tensor" else message))
        self.sent.append((self.phase, kind, payload, size))


def facts_of(name: str) -> dict[str, Any]:
    """The last whole step of a program, from the end of one optimizer step to the end of the next.

    The peak is the least of several steps: gloo's threads let go of what they sent late, some steps later than others.
    """
    import rank_programs

    rank_programs.STEPS = STEPS
    witness = Ordered()
    steps: list[dict[str, Any]] = []
    backward = torch.autograd.backward

    def in_backward(*args: Any, **kwargs: Any) -> Any:
        before, witness.phase = witness.phase, "backward"
        try:
            return backward(*args, **kwargs)
        finally:
            witness.phase = before

    def begin(*_: Any) -> None:
        witness.phase = "optimizer"

    def end(*_: Any) -> None:
        steps.append({"sent": witness.sent, "peak": witness.peak, "left": witness.live})
        witness.sent, witness.peak, witness.phase = [], witness.live, "forward"

    witness.phase = "forward"
    hooks = [optimizers.register_optimizer_step_pre_hook(begin), optimizers.register_optimizer_step_post_hook(end)]
    torch.autograd.backward = in_backward
    try:
        with witness.following_resizes(), witness:
            getattr(rank_programs, name)()
    finally:
        torch.autograd.backward = backward
        for each in hooks:
            each.remove()
        if dist.is_initialized():
            dist.destroy_process_group()
    return {**steps[-1], "peak": min(each["peak"] for each in steps[1:]), "before": steps[-2]["left"]}


def main(names: str, rank: str, world: str, port: str, out: str) -> None:
    """Each program in its own process group; ranks meet at the port."""
    torch.set_num_threads(1)
    os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "MASTER_ADDR": "localhost"}
    facts = {}
    for at, name in enumerate(names.split(",")):
        os.environ["MASTER_PORT"] = str(int(port) + at)
        try:
            facts[name] = facts_of(name)
        except Exception:
            facts[name] = {"error": traceback.format_exc()}
            break
    Path(out).write_text(json.dumps(facts))


if __name__ == "__main__":
    main(*sys.argv[1:])

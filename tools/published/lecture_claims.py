"""Mistakes of public accounts of a lecture, and of the lecture's own file: each worked out again, or run.

What is said of code is run by torch here: such a claim has no command. Numbers count what happens.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any
from warnings import catch_warnings

from claim import Claim, show

import trainledger as tl
from trainledger import catalog
from trainledger.ledger import rules_of_thumb as thumb
from trainledger.spec.dtypes import FORMATS
from trainledger.spec.units import GIGA, MIB
from trainledger.tensors.einsum import einsum, read_tensor


def torch() -> Any:
    import torch

    return torch


def numpy() -> Any:
    import numpy

    return numpy


# Numbers


def per_device() -> Claim:
    value = tl.napkin(device="h100-sxm", count=1).params["fp32-adamw"]
    shown = show("napkin --device h100-sxm --count 1", "holds at most 5B parameters at 16 bytes each")
    return Claim((value,), shown, None, "in no way: 80 GB over 16 bytes are 5B, and 40B on eight devices")


def wide() -> Claim:
    nbytes = {name: FORMATS[name].bits / 8 for name in ("fp64", "fp32", "bf16")}
    how = f"in no way: {nbytes['fp64']:g} bytes are 2 x fp32 and {nbytes['fp64'] / nbytes['bf16']:g} x bf16"
    return Claim((nbytes["fp64"] / nbytes["fp32"],), show("dtype fp64", "bits", "64: sign 1"), None, how)


def digits() -> Claim:
    value = (FORMATS["e5m2"].mantissa_bits + 1) * math.log10(2)
    return Claim((value,), show("dtype e5m2", "decimal digits", f"{value:.2g}"), None, "in no way: 3 significant bits")


def mixed() -> Claim:
    masters, throughout = (thumb.STATES[name].bytes_per_parameter for name in ("bf16-master-adamw", "bf16-adamw"))
    words = "napkin --params 1.28B --tokens 300B --device h100-sxm --count 8 --mfu 0.5 --full"
    shown = (*show(words, "bf16 with fp32 master", f"= {masters:g} "), *show(words, "bf16 throughout", "= 8 "))
    return Claim((masters,), shown, (throughout,), "is bf16 throughout, without fp32 masters and moments")


def steps() -> Claim:
    given = {"recipe.tokens": "15T", "recipe.global_batch": 512, "recipe.micro_batch": 512, "recipe.seq_len": 8192}
    value = tl.load("llama-3-8b", given | {"recipe.precision": "bf16-mixed"}).recipe.total_steps
    shown = show("loop llama-3-8b --set recipe.tokens=15T --set recipe.global_batch=512", f"{value:,} steps of 4.194M")
    return Claim((value,), shown, None, "in no way: 15T tokens in steps of 4M are millions of steps")


def one_and_a_half_billion() -> Claim:
    parts = {each: thumb.block_parameters(2048, 24) + each * 2048 for each in (32000, 2 * 50257)}
    shown = show('tensor "fp32[32000,2048]"', "elements", f"{32000 * 2048:,}")
    how = "needs two matrices of 50,257 tokens instead of one of 32,000"
    return Claim((parts[32000],), shown, (parts[2 * 50257],), how)


def megabytes() -> Claim:
    nbytes = read_tensor("fp32[1024,1024]").nbytes
    shown = (*show('tensor "fp32[1024,1024]"', "MB", "4.1943"), *show('tensor "fp32[1024,1024]"', "MiB", "4"))
    return Claim((nbytes / 1e6,), shown, (nbytes / MIB,), "is in MiB")


BIG = {"recipe.seq_len": 2048, "recipe.global_batch": 8, "recipe.attention": "math", "cluster.device": "h100-sxm"}


def activations() -> Claim:
    words = " ".join(f"--set {name}={value}" for name, value in BIG.items())
    kept = tl.account("llama-7b", {**BIG, "recipe.precision": "bf16-mixed"}).kept_nbytes / GIGA
    words = f"explain memory llama-7b {words} --set recipe.precision=bf16-mixed"
    return Claim((kept,), show(words, "kept by the forward", f"{kept:.4g} GB"))


def eighths() -> Claim:
    names = ("l4", "rtx-4090", "b200", "mi300x")
    found = [name for name in names if "fp8" in catalog.device(name).peak_flops_per_second]
    shown = tuple(each for name in names for each in show(f"catalog {name}", "fp8"))
    return Claim((len(found),), shown, None, "in no way: Ada, Blackwell and CDNA 3 have fp8 peaks too")


def per_element() -> Claim:
    flops = einsum("ij,jk->ik", [(1024, 512), (512, 256)]).flops
    shown = show('einsum "ij,jk->ik" 1024,512 512,256', "FLOPs", f"{flops:,}")
    return Claim((flops / (1024 * 256),), shown, (flops / (1024 * 256 * 512),), "is that of one term of an element")


def intensity() -> Claim:
    device = catalog.device("h100-sxm")
    ridge = device.peak_flops_per_second["bf16"] / (device.memory_bytes_per_second or 1)
    value = 2 * 4096**3 / (3 * 2 * 4096**2)
    words = 'einsum "ij,jk->ik" 4096,4096 4096,4096 --dtype bf16'
    shown = show(words, "FLOPs per byte", f"{value:.4g}")
    return Claim((value,), shown, (ridge,), "is the ridge point of an H100; bf16 of n x n has n / 3")


@cache
def from_start() -> Claim:
    field = "recipe.activation_checkpointing"
    given = {"recipe.precision": "fp32", "cluster.device": "a100-sxm-80gb"}
    found = tl.compare("gpt2-xl", overrides=given, over=f"{field}=none,from-start")
    words = f"compare gpt2-xl --set recipe.precision=fp32 --device a100-sxm-80gb --over {field}=none,from-start"
    value = found.rows[1].relative
    how = "squares the 48 layers; L (L + 1) / 2 blocks run forward in place of L, and backward stays"
    return Claim((value,), show(words, "from-start ", f"{value:.3g}x"), (48.0**2,), how)


# Code


def wants_gradient(x_too: bool) -> float:
    """FLOPs of the backward of x W1 W2."""
    t = torch()
    x = t.ones(1024, 256, requires_grad=x_too)
    first, second = (t.ones(256, n, requires_grad=True) for n in (256, 64))
    from torch.utils.flop_counter import FlopCounterMode

    loss = (x @ first @ second).sum()
    with FlopCounterMode(display=False) as counted:
        loss.backward()
    return float(counted.get_total_flops())


def backward() -> Claim:
    how = "counts a gradient of x that nobody computes: x wants none"
    return Claim((wants_gradient(False),), (), (wants_gradient(True),), how)


def truncation() -> Claim:
    t = torch()
    std, seen = 1 / 128, {}
    for bound in (3.0, 3 * std):
        weights = t.empty(1024, 1024)
        t.nn.init.trunc_normal_(weights, std=std, a=-bound, b=bound, generator=t.Generator().manual_seed(0))
        seen[bound] = weights.abs().max().item() / std
    assert seen[3.0] > 4
    how = "takes the bounds for deviations; they are absolute, and cut at 384 of them"
    return Claim((seen[3.0],), (), (seen[3 * std],), how)


def sums() -> Claim:
    t = torch()
    x = t.ones(2, 3, 4)
    words = 'einsum "batch seq hidden -> batch seq" 2,3,4 --reduce'
    shown = (*show(f"{words} sum", "sum(hidden)"), *show(f"{words} mean", "mean(hidden)"))
    value = (x.sum(-1) / x.mean(-1)).max().item()
    return Claim((value,), shown, None, "in no way: a sum over 4 is 4 times their mean")


def autocast() -> Claim:
    failed = 0
    with catch_warnings(action="ignore", category=FutureWarning):  # of its new name
        try:
            torch().cuda.amp.autocast(device_type="cuda")
        except TypeError:
            failed = 1
    torch().autocast(device_type="cpu")
    return Claim((failed,), (), None, "in no way: a TypeError; torch.autocast takes device_type")


def names() -> Claim:
    forms = "checkpoint_step_{{step}}.pt", "checkpoint_step_{step}.pt"
    written, meant = ({form.format(step=step) for step in (100, 200)} for form in forms)
    return Claim((len(written),), (), (len(meant),), "takes the text for an f-string, whose f is missing")


def header() -> Claim:
    np = numpy()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tokens.npy"
        np.save(path, np.arange(10, dtype=np.int32))
        read, meant = len(np.memmap(path, dtype=np.int32)), len(np.load(path, mmap_mode="r"))
    return Claim((read,), (), (meant,), "takes the file for bare numbers; np.save writes a header of 128 bytes first")


def threads() -> Claim:
    t = torch()
    before = t.get_num_threads()
    t.set_num_threads(2)
    t.use_deterministic_algorithms(True)
    found = t.get_num_threads()
    t.use_deterministic_algorithms(False)
    t.set_num_threads(before)
    return Claim((found,), (), None, "in no way: it selects kernels that give the same bits, or raises")


def clearing() -> Claim:
    """Of three places of zero_grad those that give the same weights after three steps."""
    t = torch()

    def trained(place: str) -> list[float]:
        w = t.ones(3, requires_grad=True)
        optimizer = t.optim.SGD([w], lr=0.1)
        for _ in range(3):
            if place == "before forward":
                optimizer.zero_grad()
            loss = (w * t.arange(3.0)).square().sum()
            if place == "before backward":
                optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if place == "after step":
                optimizer.zero_grad()
        return list(w.tolist())

    right = trained("after step")
    same = [place for place in ("after step", "before forward", "before backward") if trained(place) == right]
    assert trained("never") != right
    return Claim((len(same),), (), None, "in no way: anywhere between a step and the next backward")


CLAIMS: dict[str, Callable[[], Claim]] = {
    "per_device_16b": per_device, "fp64_triples": wide, "e5m2_digits": digits, "mixed_8_bytes": mixed,
    "steps_of_trillions": steps, "params_1_4b": one_and_a_half_billion, "square_4_mb": megabytes,
    "activations_320": activations, "fp8_only_h100": eighths, "flops_per_element": per_element,
    "intensity_300": intensity, "squared_recomputation": from_start, "backward_of_input": backward,
    "truncation_cuts": truncation, "sum_beside_mean": sums, "autocast_device_type": autocast,
    "checkpoint_names": names, "memmap_of_npy": header, "deterministic_sequential": threads,
    "zero_grad_place": clearing,
}  # fmt: skip

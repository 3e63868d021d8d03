"""Which number format does the arithmetic: fp32 throughout, or bf16 autocast over fp32 parameters."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch


def autocast(precision: str, device: torch.device) -> AbstractContextManager[None]:
    """The context of a forward pass: nothing for ``fp32``, bf16 autocast for ``bf16-mixed``.

    Matrix products then run in bf16; parameters, gradients, optimizer states, norms and the loss stay fp32.
    """
    if precision == "bf16-mixed":
        return torch.autocast(device.type, dtype=torch.bfloat16)
    return nullcontext()


def keep_fp32_exact() -> None:
    """fp32 means fp32: no TF32 in CUDA matmuls, so that one run file means one arithmetic on every device."""
    torch.set_float32_matmul_precision("highest")

"""Tokens per second and MFU of a step of a metered loop, and on what the FLOPs rest."""

from __future__ import annotations

import torch
from torch import nn

from trainledger.catalog import device_of_driver
from trainledger.ledger.ledger import Ledger
from trainledger.predict.utilization import mfu
from trainledger.spec.calibration import find_calibration
from trainledger.trace.recorder.tensor_facts import dtype_name

_PER_PARAMETER_AND_TOKEN = 6  # two FLOPs of a multiply-add in forward, four in backward; attention is left out


class Speed:
    """``basis`` says where the FLOPs come from: given, measured (a recorded step), or assumed (6 N D)."""

    def __init__(self, model: nn.Module, device: torch.device, model_flops: int | None, ranks: int) -> None:
        trained = [each for each in model.parameters() if each.requires_grad]
        self.parameters = sum(each.numel() for each in trained)  # of a DTensor the whole
        self._formats = [each.dtype for each in trained[:1]]
        self._device, self._ranks = device, ranks
        self._model_flops = model_flops
        self.basis = "assumed" if model_flops is None else "given"
        if device.type == "cuda":
            sheet = device_of_driver(torch.cuda.get_device_name(device))
            self._peaks = {} if sheet is None else sheet.peak_flops_per_second
        else:
            calibration = find_calibration(device.type)
            self._peaks = {} if calibration is None else calibration.peak_flops_per_second
        self._format: str | None = None

    def see_format(self) -> None:
        """Take note, inside of a forward, of the format that products are in."""
        kind = self._device.type
        if self._format is None:
            autocast = torch.is_autocast_enabled(kind)
            found = [torch.get_autocast_dtype(kind)] if autocast else self._formats
            self._format = dtype_name(found[0]) if found else ""

    def record(self, ledger: Ledger) -> None:
        """Take the FLOPs of a recorded step of this rank."""
        if self.basis == "assumed":
            self._model_flops, self.basis = ledger.model_flops * self._ranks, "measured"

    def of(self, tokens: int, seconds: float) -> dict[str, float]:
        """tokens_per_second, and mfu of all devices, of a step; what is not known is left out."""
        found: dict[str, float] = {}
        if tokens and seconds:
            found["tokens_per_second"] = tokens / seconds
        flops = self._model_flops or _PER_PARAMETER_AND_TOKEN * self.parameters * tokens
        peak = self._peaks.get(self._format or "")
        if flops and seconds and peak:
            found["mfu"] = mfu(flops, seconds, peak * self._ranks)
        return found

"""Tokens per second and MFU of a step of a metered loop, and on what the FLOPs rest."""

from __future__ import annotations

import torch
from torch import nn

from trainledger.catalog import device_of_driver
from trainledger.forecast.predict.forecast import Forecast
from trainledger.forecast.predict.step import step_time
from trainledger.forecast.predict.utilization import matmul_dtype, mfu
from trainledger.ledger.ledger import Ledger
from trainledger.ledger.rules_of_thumb import training_flops
from trainledger.spec.calibration import Calibration, find_calibration
from trainledger.spec.cluster import Device
from trainledger.trace.recorder.storages import dtype_name


class Speed:
    """``basis`` says where the FLOPs come from: given, measured (a recorded step), or assumed (6 N D)."""

    def __init__(self, model: nn.Module, device: torch.device, model_flops: int | None, ranks: int) -> None:
        trained = [each for each in model.parameters() if each.requires_grad]
        self.parameters = sum(each.numel() for each in trained)  # of a DTensor the whole
        self._formats = [each.dtype for each in trained[:1]]
        self._device, self._ranks = device, ranks
        self._model_flops = model_flops
        self.basis = "assumed" if model_flops is None else "given"
        self._machine: Device | Calibration | None = find_calibration(device.type)
        if device.type == "cuda":
            self._machine = device_of_driver(torch.cuda.get_device_name(device)) or self._machine
        self._peaks = {} if self._machine is None else self._machine.peak_flops_per_second
        self._format: str | None = None

    def see_format(self) -> None:
        """Take note, inside of a forward, of the format that matmuls are in."""
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
        flops = self._model_flops or training_flops(self.parameters, tokens)
        peak = self._peaks.get(self._format or "")
        if flops and seconds and peak:
            found["mfu"] = mfu(flops, seconds, peak * self._ranks)
        return found

    def forecast(self, ledger: Ledger) -> Forecast | None:
        """What the operations of a recorded step take at the rates of this machine; None where it was not measured."""
        if self._machine is None:
            return None
        step, peak = step_time(ledger, self._machine), self._peaks.get(matmul_dtype(ledger))
        share = mfu(ledger.model_flops, step.seconds, peak) if step.seconds and peak else None
        return Forecast(
            model_flops=ledger.model_flops, step_seconds=step.seconds, step_seconds_by_phase=step.by_phase,
            tokens_per_second=ledger.tokens / step.seconds if step.seconds else None, mfu=share,
            peak_flops_per_second=peak, basis={"step_seconds": step.basis},
            notes=("the forecast is of the operations of the recorded step, at the rates of this machine", *step.notes),
        )  # fmt: skip

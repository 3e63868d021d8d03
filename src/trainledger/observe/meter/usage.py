"""Memory, processor use, tokens per second and MFU of a metered loop."""

from __future__ import annotations

import os
import resource
import sys
import time
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from trainledger.catalog import device_of_driver
from trainledger.engine.train.device import host_threads
from trainledger.forecast.predict.forecast import Forecast
from trainledger.forecast.predict.roofline import matmul_dtype, mfu
from trainledger.forecast.predict.step import step_time
from trainledger.ledger.ledger import Ledger, summary
from trainledger.ledger.rules_of_thumb import training_flops
from trainledger.observe.measure.hardware import others_between, pace_of, processor_use
from trainledger.spec.calibration import Calibration, find_calibration
from trainledger.spec.device import Device
from trainledger.spec.units import KIB
from trainledger.trace.recorder.storages import dtype_name

_EVERY_SECONDS = 0.2  # a reading takes some 0.2 ms


class Usage:
    """Readings of this process: of a CPU's memory what it holds resident, of an accelerator's what is allocated."""

    def __init__(self, device: torch.device) -> None:
        self._on_device = device.type == "cuda"
        self._device = device
        self._threads = host_threads(device)
        self._pace = pace_of(device)
        self._before = processor_use()
        self._last: dict[str, Any] = {}
        self._at = -_EVERY_SECONDS

    def now(self) -> dict[str, Any]:
        """memory_nbytes, peak_memory_nbytes, others (cores that other processes took) and slowdown (of a small matmul
        on a CPU, over its least seconds), as last read.
        """
        if time.perf_counter() - self._at >= _EVERY_SECONDS:
            use = processor_use()
            self._last = {**self._memory(), "others": others_between(self._before, use, self._threads)}
            if self._pace is not None:
                self._last["slowdown"] = self._pace.slowdown()
            self._before, self._at = use, time.perf_counter()
        return self._last

    def _memory(self) -> dict[str, int]:
        if self._on_device:
            statistics = torch.cuda.memory_stats(self._device)
            names = {"memory_nbytes": "allocated_bytes.all.current", "peak_memory_nbytes": "allocated_bytes.all.peak"}
            return {ours: int(statistics.get(theirs, 0)) for ours, theirs in names.items()}
        scale = 1 if sys.platform == "darwin" else KIB
        found = {"peak_memory_nbytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * scale}
        try:
            with open("/proc/self/statm", encoding="ascii") as file:
                found["memory_nbytes"] = int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        except OSError:
            pass
        return found


class Speed:
    """``basis`` says where the FLOPs come from: given, measured (a recorded step), or assumed (6 N D)."""

    def __init__(self, model: nn.Module, device: torch.device, model_flops: int | None, ranks: int) -> None:
        self._trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._device, self._ranks = device, ranks
        self._model_flops = model_flops
        self.basis = "assumed" if model_flops is None else "given"
        self._machine: Device | Calibration | None = find_calibration(device.type)
        if device.type == "cuda":
            self._machine = device_of_driver(torch.cuda.get_device_name(device)) or self._machine
        self._peaks = {} if self._machine is None else self._machine.peak_flops_per_second
        self._format: str | None = None

    @property
    def parameters(self) -> int:
        """Trained parameters, of a DTensor the whole; of a lazy module those that it has by now."""
        return sum(parameter.numel() for parameter in self._trained if not is_lazy(parameter))

    def see_format(self) -> None:
        """Take note, inside of a forward, of the format that matmuls are in."""
        kind = self._device.type
        if self._format is None:
            autocast = torch.is_autocast_enabled(kind)
            found = (
                [torch.get_autocast_dtype(kind)] if autocast else [parameter.dtype for parameter in self._trained[:1]]
            )
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

    def forecast(self, ledger: Ledger, *, traced: bool = False) -> Forecast | None:
        """What the operations of a recorded or ``traced`` step of this rank take at the rates of this machine.

        A trace also predicts FLOPs and bytes, which a record measures; None is a record on a machine without rates.
        """
        if self._machine is None and not traced:
            return None
        figures = {"model_flops": ledger.model_flops}
        if traced:
            figures = summary(ledger) | {"tokens_per_step": ledger.tokens * self._ranks or None}
        timed = Forecast(notes=("no step time: this machine was not measured (trainledger measure machine)",))
        if self._machine is not None:
            step = step_time(ledger, self._machine, tensors=len(self._trained))
            peak, tokens = self._peaks.get(matmul_dtype(ledger)), figures.get("tokens_per_step", ledger.tokens)
            timed = Forecast(
                step_seconds=step.seconds,
                step_seconds_by_phase=step.by_phase,
                tokens_per_second=tokens / step.seconds if step.seconds and tokens else None,
                mfu=mfu(ledger.model_flops, step.seconds, peak) if step.seconds and peak else None,
                peak_flops_per_second=peak,
                basis={"step_seconds": step.basis},
                notes=step.notes,
            )
        of_step = f"the forecast is of the operations of the {'traced' if traced else 'recorded'} step"
        return replace(timed, **figures, notes=(f"{of_step}, at the rates of this machine", *timed.notes))

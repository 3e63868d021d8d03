"""Which precision this machine trains fastest in: as its calibration predicts, or as its processor lets expect."""

from __future__ import annotations

from pathlib import Path

from trainledger.answers.machine import THIS_MACHINE, kernels_of, machine_of
from trainledger.forecast.predict.predict import predict
from trainledger.spec.frozen import frozen
from trainledger.spec.problem import InvalidInput
from trainledger.spec.run import Run
from trainledger.spec.run_text import changed

FP32, MIXED = "fp32", "bf16-mixed"
LEAST_GAIN = 1.05  # how many times as fast a step must be predicted: coarser numbers for less are no bargain
# What x86 processors with matmuls in bf16 say of themselves; others widen to fp32, multiply and round.
BF16_FLAGS = ("amx_bf16", "avx512_bf16")
CPUINFO, NVIDIA = Path("/proc/cpuinfo"), Path("/proc/driver/nvidia/version")


@frozen
class FastPrecision:
    """fp32 or bf16-mixed, why, and how many times as fast bf16-mixed is as fp32 (None where that is not predicted)."""

    kind: str
    why: str
    gain: float | None = None


def fast_precision(run: Run) -> FastPrecision | None:
    """The faster of fp32 and bf16 autocast for a run on this machine; None where nothing is known of it.

    A calibration predicts a step in both. Without one, the flags of an x86 processor say whether it multiplies in bf16;
    of a machine with an NVIDIA GPU, which would train there, they say nothing.
    """
    if run.cluster.device != THIS_MACHINE:
        return None
    machine = machine_of(run)
    if machine is None:
        return _by_flags(run)
    whole, mixed = (
        predict(changed(run, {"recipe.precision": kind}), machine, backend=kernels_of(run)).step_seconds
        for kind in (FP32, MIXED)
    )
    if whole is None:
        return None
    if mixed is None:
        return FastPrecision(FP32, "this machine was measured, and has no matmuls in bf16 that are worth timing")
    gain = whole / mixed
    if gain < LEAST_GAIN:
        return FastPrecision(FP32, f"bf16 autocast is predicted to be {gain:.2g} times as fast on this machine", gain)
    return FastPrecision(MIXED, f"bf16 autocast is predicted to be {gain:.2g} times as fast as fp32 here", gain)


def precision_notes(run: Run) -> tuple[str, ...]:
    """What a change of precision would do to a run's time where that cannot be predicted."""
    now = run.recipe.precision.kind
    try:
        fast = fast_precision(run) if now in (FP32, MIXED) else None
    except InvalidInput:  # what else the run asks for goes with one of the two alone
        return ()
    if fast is None or fast.gain is not None or fast.kind == now:
        return ()
    return (f"precision {fast.kind} is probably faster here: {fast.why}.",)


def _by_flags(run: Run) -> FastPrecision | None:
    if run.cluster.backend not in ("auto", "cpu") or (run.cluster.backend == "auto" and NVIDIA.exists()):
        return None
    flag = next((bf16_flag for bf16_flag in BF16_FLAGS if bf16_flag in cpu_flags()), None)
    if flag is None:
        return None
    return FastPrecision(
        MIXED, f"this processor multiplies in bf16 ({flag}); trainledger measure machine says how much faster"
    )


def cpu_flags() -> frozenset[str]:
    """The processor's features; empty where the system does not list them."""
    try:
        text = CPUINFO.read_text(encoding="utf-8")
    except (OSError, ValueError):
        return frozenset()
    flags = (line.partition(":")[2] for line in text.splitlines() if line.partition(":")[0].strip() == "flags")
    return frozenset(next(flags, "").split())

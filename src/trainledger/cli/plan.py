"""What a run will cost before it starts: parameters, FLOPs, memory by category, time and money.

RUN is a run file, or a model of the catalog under a default recipe (one full-length sequence, bf16 autocast).
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from trainledger.cli.arguments import add_json, add_run, load_run, print_json
from trainledger.report.table import table
from trainledger.units import (
    SECONDS_PER_DAY,
    format_count,
    format_flops,
    format_flops_per_second,
    format_nbytes,
    format_percent,
    format_seconds,
)

if TYPE_CHECKING:
    from trainledger.ledger.entry import Ledger
    from trainledger.plan.beside import Beside
    from trainledger.predict.forecast import Forecast
    from trainledger.spec.run import Run


def configure(parser: argparse.ArgumentParser) -> None:
    add_run(parser)
    parser.add_argument("--mfu", default="0.5", help="share of the peak for the napkin's days (0.5)")
    add_json(parser)


def execute(args: argparse.Namespace) -> int:
    from trainledger.api import kernels_of, machine_of
    from trainledger.ledger.step import account
    from trainledger.plan.beside import beside
    from trainledger.predict.forecast import forecast
    from trainledger.units import parse_number

    run = _run(args)
    ledger = account(run, backend=kernels_of(run))
    told = forecast(run, ledger, machine_of(run))
    rules = beside(run, ledger)
    days = _napkin_days(run, ledger, parse_number(args.mfu))
    if args.json:
        print_json(_json(run, told, rules, days))
    else:
        print("\n\n".join(each for each in _text(run, ledger, told, rules, days, args.mfu) if each))
    return 0


def _run(args: argparse.Namespace) -> Run:
    """The run file, or a catalog model's default run where no such file exists but such a model does."""
    from trainledger import catalog

    name = args.run
    if not name.endswith(".toml") and name in catalog.model_names():
        from trainledger.api import load

        longest = catalog.model(name)["max_seq_len"]
        recipe = {"seq_len": longest, "global_batch": 1, "steps": 1, "precision": "bf16-mixed"}
        overrides = list(args.set)
        if any(each.replace(" ", "").startswith("recipe.tokens=") for each in overrides):
            del recipe["steps"]
        return load({"model": {"preset": name}, "recipe": recipe}, overrides)
    return load_run(args)


def _napkin_days(run: Run, ledger: Ledger, mfu: float) -> float | None:
    """6ND over the devices' peak, where the run has tokens to train on and a device with a peak."""
    from trainledger.api import device_of
    from trainledger.ledger.rules_of_thumb import training_flops, training_seconds

    device = device_of(run)
    dtype = "bf16" if run.recipe.precision == "bf16-mixed" else "fp32"
    peak = device.peak_flops_per_second.get(dtype) if device is not None else None
    if peak is None:
        return None
    flops = training_flops(ledger.parameters, run.recipe.total_steps * run.recipe.tokens_per_step)
    return float(training_seconds(flops, run.cluster.count, peak, mfu)) / SECONDS_PER_DAY


def _text(
    run: Run, ledger: Ledger, told: Forecast, rules: tuple[Beside, ...], days: float | None, mfu: str
) -> list[str]:
    recipe = run.recipe
    head = f"{run.model.name}: {ledger.parameters:,} parameters in {run.model.n_layers} blocks of {run.model.d_model}"
    step = f"one optimizer step: {recipe.global_batch} x {recipe.seq_len} tokens"
    step += f" in {recipe.grad_accum} micro-batches" if recipe.grad_accum > 1 else ""
    how = f"{recipe.precision}, {recipe.optimizer}, {recipe.attention} attention, "
    how += f"{recipe.activation_checkpointing} checkpointing"
    return [
        "\n".join([head, step, how]), _memory(run, told), _flops(told), _time(run, told), _rules(rules),
        _days(run, ledger, days, mfu), "\n".join(f"Note: {each}" for each in told.notes),
    ]  # fmt: skip


def _memory(run: Run, told: Forecast) -> str:
    from trainledger.api import device_of

    assert told.peak_nbytes is not None
    rows = [
        [name, format_nbytes(nbytes), format_percent(nbytes / told.peak_nbytes)]
        for name, nbytes in sorted(told.peak_by_category.items(), key=lambda each: -each[1])
    ]
    rows.append(["peak", format_nbytes(told.peak_nbytes), "exact"])
    lines = ["Memory of one device that holds the whole model, at the peak of the step", table(["", "bytes", ""], rows, align="lrr")]
    lines.append(f"kept by each micro-batch for its backward: {format_nbytes(told.kept_nbytes or 0)}")
    device = device_of(run)
    if device is not None and device.memory_nbytes:
        fits = "fits in" if told.peak_nbytes <= device.memory_nbytes else "does not fit in"
        box = f"the {format_nbytes(device.memory_nbytes)} of {device.title}"
        lines.append(f"{fits} {box} (its allocator and context take some of that)")
    return "\n".join(lines)


def _flops(told: Forecast) -> str:
    rows = [[kind, format_flops(flops)] for kind, flops in sorted(told.flops.items(), key=lambda each: -each[1])]
    rows.append(["model FLOPs", format_flops(told.model_flops or 0)])
    return "FLOPs of the step (model FLOPs: matmuls and attention without recomputation)\n" + table(
        ["", "FLOPs"], rows, align="lr"
    )


def _time(run: Run, told: Forecast) -> str:
    if told.step_seconds is None:
        return ""
    basis = told.basis.get("step_seconds", "")
    rows = [["step", format_seconds(told.step_seconds)]]
    if told.tokens_per_second is not None:
        rows.append(["tokens/s", f"{told.tokens_per_second:,.4g}"])
    if told.mfu is not None and told.peak_flops_per_second is not None:
        of = format_flops_per_second(told.peak_flops_per_second)
        rows.append(["MFU", f"{format_percent(told.mfu)} of {of} {told.matmul_dtype}"])
    if told.total_seconds is not None:
        rows.append([f"{run.recipe.total_steps:,} steps", format_seconds(told.total_seconds)])
    if told.device_hours is not None:
        rows.append(["device-hours", f"{told.device_hours:,.4g}"])
    if told.money is not None:
        rows.append(["money", f"{told.money:,.2f}"])
    return f"Time on {told.device} ({basis})\n" + table(["", ""], rows, align="ll")


def _rules(rules: tuple[Beside, ...]) -> str:
    show = {"count": format_count, "flops": format_flops, "nbytes": format_nbytes}
    rows = [
        [each.quantity, each.rule, show[each.unit](each.by_rule), show[each.unit](each.by_ledger), f"{100 * each.error:+.1f} %"]
        for each in rules
    ]
    return "Rules of thumb beside the ledger\n" + table(
        ["", "rule", "says", "ledger", "off by"], rows, align="llrrr"
    )


def _days(run: Run, ledger: Ledger, days: float | None, mfu: str) -> str:
    if days is None:
        return ""
    tokens = run.recipe.total_steps * run.recipe.tokens_per_step
    return (
        f"Napkin: 6 N D / (devices x peak x MFU) = 6 x {ledger.parameters:.4g} x {tokens:.4g} on "
        f"{run.cluster.count:,} devices\nat {mfu} MFU = {days:,.4g} days"
    )


def _json(run: Run, told: Forecast, rules: tuple[Beside, ...], days: float | None) -> dict[str, Any]:
    from trainledger.spec.runfile import resolved

    return {
        "run": resolved(run),
        "forecast": vars(told),
        "rules_of_thumb": [{**vars(each), "error": each.error} for each in rules],
        "napkin_days": days,
    }

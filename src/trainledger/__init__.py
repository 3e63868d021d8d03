"""trainledger accounts for every byte and every FLOP of a training run.

Every public name answers one question; a name is imported when it is first used, so that
``import trainledger`` brings in neither torch nor numpy.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_NAMES = {  # of each module
    "trace.annotate.annotate": "annotate",
    "answers.advise": "advise",
    "answers.budget": "optimal",
    "answers.compare": "compare",
    "answers.copies": "copy_seconds",
    "answers.cost": "account on_device parameters predict",
    "answers.layouts": "layouts",
    "answers.load": "load model",
    "answers.loop": "loop",
    "answers.machine": "device_of machine_of",
    "answers.breaks": "breaks",
    "answers.explain": "explain",
    "answers.fit": "fit",
    "answers.fits": "fits",
    "answers.inference": "inference",
    "answers.napkin": "napkin",
    "answers.plan": "plan",
    "answers.rl": "rl",
    "catalog": "device",
    "spec.convert.huggingface": "model_from_hf",
    "ledger.entry": "Entry",
    "ledger.ledger": "Ledger",
    "observe.measure.meter": "meter",
    "observe.meter.loop": "meter_loop",
    "observe.reconcile": "reconcile",
    "spec.calibration": "Calibration",
    "spec.cluster": "Cluster",
    "spec.device": "Device",
    "spec.layout": "Layout",
    "spec.model": "ModelSpec",
    "spec.problem": "InvalidInput Problem",
    "spec.recipe": "Recipe",
    "spec.run": "DataSpec Run",
    "tensors.inspect": "inspect",
    "trace": "trace trace_step",
    "trace.distributed": "fake_world trace_rank",
    "trace.operators.custom": "cost_rule",
    "trace.target": "TrainingStep",
}
_WHERE = {name: f"trainledger.{module}" for module, names in _NAMES.items() for name in names.split()}

if TYPE_CHECKING:
    from trainledger.answers.advise import advise
    from trainledger.answers.breaks import breaks
    from trainledger.answers.budget import optimal
    from trainledger.answers.compare import compare
    from trainledger.answers.copies import copy_seconds
    from trainledger.answers.cost import account, on_device, parameters, predict
    from trainledger.answers.explain import explain
    from trainledger.answers.fit import fit
    from trainledger.answers.fits import fits
    from trainledger.answers.inference import inference
    from trainledger.answers.layouts import layouts
    from trainledger.answers.load import load, model
    from trainledger.answers.loop import loop
    from trainledger.answers.machine import device_of, machine_of
    from trainledger.answers.napkin import napkin
    from trainledger.answers.plan import plan
    from trainledger.answers.rl import rl
    from trainledger.catalog import device
    from trainledger.ledger.entry import Entry
    from trainledger.ledger.ledger import Ledger
    from trainledger.observe.measure.meter import meter
    from trainledger.observe.meter.loop import meter_loop
    from trainledger.observe.reconcile import reconcile
    from trainledger.spec.calibration import Calibration
    from trainledger.spec.cluster import Cluster
    from trainledger.spec.convert.huggingface import model_from_hf
    from trainledger.spec.device import Device
    from trainledger.spec.layout import Layout
    from trainledger.spec.model import ModelSpec
    from trainledger.spec.problem import InvalidInput, Problem
    from trainledger.spec.recipe import Recipe
    from trainledger.spec.run import DataSpec, Run
    from trainledger.tensors.inspect import inspect
    from trainledger.trace import trace, trace_step
    from trainledger.trace.distributed import fake_world, trace_rank
    from trainledger.trace.operators.custom import cost_rule
    from trainledger.trace.target import TrainingStep

__all__ = [
    "Calibration", "Cluster", "DataSpec", "Device", "Entry", "InvalidInput", "Layout", "Ledger", "ModelSpec",
    "Problem", "Recipe", "Run", "TrainingStep", "account", "advise", "annotate", "breaks", "compare", "copy_seconds",
    "cost_rule", "device", "device_of", "explain", "fake_world", "fit", "fits", "inference", "inspect", "layouts",
    "load", "loop", "machine_of", "meter", "meter_loop", "model", "model_from_hf", "napkin", "on_device", "optimal",
    "parameters", "plan", "predict", "reconcile", "rl", "trace", "trace_rank", "trace_step",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    where = _WHERE.get(name)
    if where is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(where), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_WHERE})


class _Face(ModuleType):
    """Keeps ``trainledger.trace`` the function once the import system binds the room of the same name."""

    def __setattr__(self, name: str, value: Any) -> None:
        if not (name in _WHERE and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Face

"""The public names, each with the module that has it: `__init__.py` imports a name from there when it is first used."""

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
from trainledger.trace.annotate.annotate import annotate
from trainledger.trace.distributed import fake_world, trace_rank
from trainledger.trace.operators.custom import cost_rule
from trainledger.trace.target import TrainingStep

__version__: str
__all__ = [
    "Calibration", "Cluster", "DataSpec", "Device", "Entry", "InvalidInput", "Layout", "Ledger", "ModelSpec",
    "Problem", "Recipe", "Run", "TrainingStep", "account", "advise", "annotate", "breaks", "compare", "copy_seconds",
    "cost_rule", "device", "device_of", "explain", "fake_world", "fit", "fits", "inference", "inspect", "layouts",
    "load", "loop", "machine_of", "meter", "meter_loop", "model", "model_from_hf", "napkin", "on_device", "optimal",
    "parameters", "plan", "predict", "reconcile", "rl", "trace", "trace_rank", "trace_step",
]  # fmt: skip

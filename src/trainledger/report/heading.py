"""The line above an account that says whose it is."""

from __future__ import annotations

from trainledger.report.table import wrapped
from trainledger.spec.run import Run
from trainledger.units import counted


def heading(run: Run, backend: str) -> str:
    """The model, the devices, a step and whose kernels run it (``backend``: cpu or cuda), in at most 80 columns.

    >>> from trainledger.loaded import load
    >>> run = load({"model": {"preset": "gpt2"}, "recipe": {"seq_len": 512, "global_batch": 4, "steps": 1}})
    >>> print(heading(run, "cpu"))
    gpt2 on this-machine, with the kernels of a CPU: 4 sequences of 512 tokens a
    step, fp32, adamw
    """
    cluster, recipe = run.cluster, run.recipe
    where = cluster.device if cluster.count == 1 else f"{cluster.count:,} x {cluster.device}"
    kernels = ", with the kernels of a CPU" if backend == "cpu" else ""
    step = f"{counted(recipe.global_batch, 'sequence')} of {counted(recipe.seq_len, 'token')} a step"
    return wrapped(f"{run.model.name} on {where}{kernels}: {step}, {recipe.precision}, {recipe.optimizer}")

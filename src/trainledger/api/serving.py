"""What a trained model takes to serve: one forward of a prompt, or of one more token."""

from __future__ import annotations

from dataclasses import replace

from trainledger.api import defaults
from trainledger.api.load import Source, resolve
from trainledger.api.machine import kernels_of, machine_of
from trainledger.api.source import also
from trainledger.plan.quantity import read
from trainledger.plan.serving import Inference, served
from trainledger.spec.problem import InvalidInput, Problem
from trainledger.spec.runfile import Overrides
from trainledger.spec.serving import Serving
from trainledger.units import parse_count


def inference(
    run: Source,
    overrides: Overrides = (),
    *,
    phase: str = "decode",
    batch: int | str = 1,
    context: int | str | None = None,
    weights: str | None = None,
    cache: str | None = None,
    compute: str | None = None,
    quantized: str = "linear",
) -> Inference:
    """One forward of the run's model, served on its device: ``prefill`` of a prompt or ``decode`` of one more token.

    ``context`` is recipe.seq_len where it is not given, ``compute`` bf16 (fp16 where the device has no bf16), and
    ``weights`` and ``cache`` (`spec.serving`) are as ``compute``. With ``layout.auto`` it takes the fewest tensor ranks
    that hold them, unless ``layout.tensor`` is given. Raises `InvalidInput`.
    """
    # A search would be one of layouts to train with.
    # What predicts further tokens is not served.
    run = resolve(run, also(overrides, {"model.n_mtp_layers": 0}), purpose=defaults.SERVE, search=False)
    if run.layout.auto and "layout.tensor" in run.origin.explicit:
        run = replace(run, layout=replace(run.layout, auto=False))
    problems: list[Problem] = []
    sequences = read("batch", batch, parse_count, problems, least=1, most=10**9)
    tokens = read("context", context, parse_count, problems, least=1, most=10**9)
    machine = machine_of(run)
    if compute is None:
        peaks = {} if machine is None else machine.peak_flops_per_second
        compute = next((each for each in ("bf16", "fp16", "fp32") if each in peaks), "bf16")
    serving = Serving(
        phase=phase, batch=sequences or 1, context=tokens or run.recipe.seq_len,
        weights=compute if weights is None else weights, cache=compute if cache is None else cache, compute=compute,
        quantized=quantized,
    )  # fmt: skip
    problems += serving.problems()
    if problems:
        raise InvalidInput(problems)
    return served(run, serving, machine, backend=kernels_of(run))

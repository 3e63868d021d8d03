"""What a run will cost: the plan of its training, or one forward of the trained model."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterable
from contextlib import suppress

import trainledger as tl
from trainledger.answers.cost import why_impossible
from trainledger.cli.arguments import PLOT, RUN, Argument, Outcome, count, group, option, options, takes
from trainledger.cli.asking import asked
from trainledger.report.document import Answer
from trainledger.spec.problem import InvalidInput, Problem

_TRAINED = (
    option("--mfu", "share of the peak for the napkin's days (0.5, or 50%%)"),
    option(
        "--convention NAME",
        "how model FLOPs and MFU are counted: 6nd, 6nd+attention, dense, causal or kernels (trainledger rules)",
    ),
)
_SERVED = (
    count("--batch N", "sequences at once (1)"),
    count("--context N", "tokens of each sequence (recipe.seq_len)"),
    option("--weights", "format of the weights: bf16, int8, int4, fp8, nf4, mxfp4 and others (that of --compute)"),
    option("--cache", "format of keys and values: bf16, fp8, int8, int4 (that of --compute)"),
    option("--compute", "format of matmuls and of what is not quantized: bf16, fp16, fp32 (bf16)"),
    option("--quantized", "matrices that have the format of the weights: linear or experts (linear)"),
)
_MOST_RANKS = 16  # tensor ranks that are proposed
_PHASE = option("--phase", "prefill or decode: one forward of the model instead of training")


@takes(*RUN, *_TRAINED, group("a trained model, served", _PHASE, *_SERVED), PLOT)
def plan(args: Namespace) -> Answer | Outcome:
    """What a run will cost before it starts: time, money, energy, memory by category, and where the time goes.

    RUN is a run file, or a model of the catalog or a Hugging Face config.json under a default recipe: one full-length
    sequence in bf16 autocast, or on several devices 4 million tokens in sequences of at most 8,192 and the layout that
    a search finds. Exit code 2 where the run does not fit in memory, or the devices cannot share it.
    """
    if "phase" in args:
        _refuse(args, _TRAINED, "is for training; a served model has no MFU: leave it out")
        return _served(args)
    _refuse(args, _SERVED, "is for a served model; give --phase too", "--phase decode")
    made = asked(tl.plan, args)
    problem = why_impossible(made)
    return made if problem is None else Outcome(made, 2, problem)


@takes(*RUN, option("--corpus TOKENS", "tokens of the text that there is (as many as are trained on)"), PLOT)
def loop(args: Namespace) -> Answer:
    """The training loop: steps and epochs, the learning rate, tokens on disk, checkpoints, and the loader.

    RUN is as of plan. Of a model without a recipe 20 tokens for each parameter are trained on.
    """
    found: Answer = asked(tl.loop, args)
    return found


def _served(args: Namespace) -> Answer | Outcome:
    """One forward of the model, of which modules that predict further tokens are no part."""
    served = tl.inference(args.run, args.set, **options(args))
    if served.fits is not False:
        return served
    near = served.largest_batch or _ranks_that_hold(args)
    rule = "does not fit in the memory of the device" + ("" if served.largest_batch else ", nor does any other batch")
    return Outcome(served, 2, Problem("--batch", served.serving.batch, rule, near))


def _ranks_that_hold(args: Namespace) -> str | None:
    """The fewest tensor ranks that hold the model and the batch, as ``layout=auto`` finds them; None without any."""
    with suppress(InvalidInput):
        found = tl.inference(args.run, [*args.set, "layout=auto", f"cluster.count={_MOST_RANKS}"], **options(args))
        if found.fits:
            return f"--count {found.run.layout.tensor} --set layout.tensor={found.run.layout.tensor}"
    return None


def _refuse(args: Namespace, arguments: Iterable[Argument], rule: str, nearest: str | None = None) -> None:
    """Raise `InvalidInput` where one of the arguments is given."""
    given = {flag: getattr(args, flag[2:]) for each in arguments for flag in each.flags if flag[2:] in args}
    if given:
        raise InvalidInput([Problem(flag, value, rule, nearest) for flag, value in given.items()])

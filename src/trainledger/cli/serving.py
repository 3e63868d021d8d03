"""The flags of ``plan --phase``: a model that is served instead of trained."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from trainledger.cli.arguments import add_count, check_plot_of, print_json, write_plot_of
from trainledger.spec.problem import InvalidInput, Problem

if TYPE_CHECKING:
    from trainledger.spec.run import Run

FLAGS = {
    "batch": "sequences at once (1)",
    "context": "tokens of each sequence (recipe.seq_len)",
    "weights": "format of the weights: bf16, int8, int4, fp8, nf4, mxfp4 and others (that of --compute)",
    "cache": "format of keys and values: bf16, fp8, int8, int4 (that of --compute)",
    "compute": "format of products and of what is not quantized: bf16, fp16, fp32 (bf16)",
    "quantized": "which matrices have the format of the weights: linear or experts (linear)",
}


def add_serving(parser: argparse.ArgumentParser) -> None:
    """``--phase`` and what belongs to it."""
    group = parser.add_argument_group("a trained model, served")
    group.add_argument("--phase", help="prefill or decode: one forward of the model instead of training")
    for name, help in FLAGS.items():
        if name in ("batch", "context"):
            add_count(group, f"--{name}", metavar="N", help=help)
        else:
            group.add_argument(f"--{name}", help=help)


def run_to_serve(args: argparse.Namespace) -> Run:
    """The run whose model is served; a layout that is to be found is left so, and tensor ranks that are given are kept.

    A model alone has the recipe that it has without a search, whose batch and length are of training.
    """
    from dataclasses import replace

    from trainledger.loaded import asks_for_layout, is_run_file, load_file, named_run
    from trainledger.spec.runfile import read_table, written

    if is_run_file(args.run):
        table, run = read_table(args.run), load_file(args.run, args.set, search=False)
    else:
        table, run = {}, named_run(args.run, [each for each in args.set if not asks_for_layout([each])])
    given = "layout.tensor" in written(table, args.set)
    auto = not given and (run.layout.auto or asks_for_layout(args.set))
    return replace(run, layout=replace(run.layout, auto=auto))


def execute_serving(args: argparse.Namespace, run: Run) -> int:
    """Print the account of one forward."""
    refuse_of_training(args)
    check_plot_of(args)
    from trainledger.cli.taken import taken_by_default
    from trainledger.questions import inference
    from trainledger.report.inference import text, to_json

    given: dict[str, Any] = {name: getattr(args, name) for name in FLAGS if getattr(args, name) is not None}
    told = inference(run, phase=args.phase, **given)
    if args.json:
        print_json(to_json(told, taken_by_default(args, run)))
    else:
        print(text(told))
    if args.plot is not None:
        from trainledger.report.inference_figures import about, figures

        write_plot_of(args, figures(told), f"{run.model.name}, served", about(told))
    return 0


def refuse_of_training(args: argparse.Namespace) -> None:
    """Raise `InvalidInput` where a flag of training stands beside ``--phase``."""
    found = []
    for name, absent in (("mfu", "0.5"), ("convention", "dense")):
        value = getattr(args, name)
        if value != absent:
            found.append(Problem(f"--{name}", value, "is for training; a served model has no MFU: leave it out"))
    if found:
        raise InvalidInput(found)


def refuse_without_phase(args: argparse.Namespace) -> None:
    """Raise `InvalidInput` where a flag of serving stands without ``--phase``."""
    alone = [Problem(f"--{name}", getattr(args, name), "is for a served model; give --phase too", "--phase decode")
             for name in FLAGS if getattr(args, name) is not None]  # fmt: skip
    if alone:
        raise InvalidInput(alone)

"""The run: a run file and a feed of batches in, trained weights out, stoppable at any instruction."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch.distributed.device_mesh import DeviceMesh

from trainledger.engine.data.loader import open_loader
from trainledger.engine.data.pairs import Pairs
from trainledger.engine.nn.init import draw, initialize
from trainledger.engine.nn.lora import adapt
from trainledger.engine.nn.objective import reference_losses
from trainledger.engine.nn.transformer import Transformer
from trainledger.engine.remarks import unheard
from trainledger.engine.train import run_directory
from trainledger.engine.train.checkpoint_contents import of_another_run, unlike, unusable
from trainledger.engine.train.device import arithmetic, refuse_launches, refuse_workspace
from trainledger.engine.train.loop import TrainingLoop
from trainledger.engine.train.observer import Finished, Observer, TrainingState
from trainledger.engine.train.optimizer import build_optimizer
from trainledger.engine.train.parallel.mesh import data_rank, limit_waiting, mesh_of
from trainledger.engine.train.parallel.model_on_rank import (
    RanksTogether,
    model_on_rank,
    optimizer_on_rank,
    reference_on_rank,
)
from trainledger.engine.train.parallel.refusals import refuse_offload, refuse_on_ranks
from trainledger.engine.train.precision import (
    LossScaler,
    MasterWeights,
    add_reference,
    autocast,
    build_model,
    refuse,
    refuse_matmuls,
)
from trainledger.engine.train.preflight import NeedsOf, forget_refusal, preflight, refused_before
from trainledger.engine.train.ranks import SECONDS_IN_A_COLLECTIVE, Ranks, joined, restarted
from trainledger.engine.train.run_directory import (
    Say,
    already,
    begin_or_match,
    locked,
    read_state,
    remove_unbegun,
    write_state,
)
from trainledger.engine.train.saving import Saver, restore
from trainledger.engine.train.step import ALONE, Feed, OpenFeed, Together, derive
from trainledger.engine.train.stop import FailedBefore, memory_told
from trainledger.engine.train.trained import refuse_other_weights, start_from
from trainledger.spec.durable import write_atomically
from trainledger.spec.problem import InvalidInput, Problem, printable
from trainledger.spec.run import Run


def train(
    run: Run,
    run_dir: Path,
    *,
    resume: bool = False,
    observers: Sequence[Observer] = (),
    open_feed: OpenFeed = open_loader,
    say: Say | None = None,
    seconds_in_a_collective: float = SECONDS_IN_A_COLLECTIVE,
    needs_of: NeedsOf | None = None,
) -> Finished:
    """Train a run in its directory to its last step, from its newest valid checkpoint where ``resume``.

    A layout of several devices takes as many processes, each of which calls this (torchrun, or `launch.launch`); a
    collective fails after ``seconds_in_a_collective`` without an answer. ``open_feed`` brings the batches: by default
    those of ``run.data``, prepared where they are not yet. ``needs_of`` says what a rank needs, and has the run looked
    at before its first step (`preflight`). A finished run is not touched again: with ``resume`` its
    result is returned. Raises `InvalidInput` where the directory holds another run, one that was begun (without
    ``resume``), one begun on other text, or one that another process holds; `Diverged`, `Interrupted`, `CannotSave`,
    `LostRank` or `OutOfMemory` where the run ends early.
    """
    say = say or say_on_stderr
    with joined(run, seconds=seconds_in_a_collective) as ranks:
        say = say if ranks.first else lambda sentence: None

        def refuse_untrained() -> None:
            if run.data.lengths is not None:
                rule = (
                    "is of padded rows, which plan, fit and layouts take; train packs the documents of data.path into "
                    "rows of recipe.seq_len, so that its steps are those of a plan without data.lengths"
                )
                raise InvalidInput([Problem("data.lengths", None, rule, "--set data.lengths=none")])
            refuse(run.recipe.precision, run.recipe)
            refuse_launches(run.recipe, str(ranks.device))
            refuse_workspace(run.recipe, str(ranks.device))
            refuse_matmuls(run.recipe.precision, ranks.device.type)
            refuse_offload(run.recipe, ranks.device.type)
            if ranks.size > 1:
                refuse_on_ranks(run)

        ranks.of_first(refuse_untrained)
        with ExitStack() as stack:
            again = ranks.summed(float(restarted()))[0]
            # Where some are new, a machine came for one that was taken away: whoever started it wants the run to go on.
            how = {"resume": resume or again > 0, "again": again == ranks.size}
            begun = ranks.of_first(lambda: _begin(run, run_dir, ranks, stack, say, **how)) or {"begun": False}
            if "finished" in begun:
                return Finished.of(run_dir, begun["finished"])
            try:
                keeps = needs_of is None or preflight(run, run_dir, ranks, needs_of, say)
                stack.enter_context(arithmetic(run.recipe, ranks.device, keeps=keeps))
                state, feed, mesh = _prepare(run, run_dir, ranks, open_feed, stack, resume=begun["begun"], say=say)
            except InvalidInput:
                if ranks.first and begun["made"]:
                    remove_unbegun(run_dir)
                raise
            saver = Saver(run_dir, ranks, mesh, background=run.recipe.checkpoints.asynchronous)
            return TrainingLoop(state, feed, observers, say, ranks, saver).run(resumed=begun["begun"])


def _begin(
    run: Run, run_dir: Path, ranks: Ranks, stack: ExitStack, say: Say, *, resume: bool, again: bool
) -> dict[str, Any]:
    """Hold the run's directory until ``stack`` ends, and find out what is in it: ``begun``, or ``finished`` facts.

    ``made`` says that it was not there before.
    ``again``: torchrun has started all ranks again by itself, which what ended them may forbid.
    """
    made = not run_dir.exists()
    stack.enter_context(locked(run_dir))
    begun = begin_or_match(run_dir, run, say)
    earlier = read_state(run_dir)
    if earlier is not None:
        refuse_other_weights(run_dir, earlier.get("initial_weights"))
    if begun and not resume:
        raise InvalidInput([already(run_dir, earlier)])
    finished = earlier if earlier is not None and earlier["state"] == "finished" else None
    more = finished is not None and finished["step"] < run.recipe.total_steps
    if finished is not None and not more and unusable(Finished.of(run_dir, finished).checkpoint, run) is None:
        say(f"{run_dir} is already finished.")
        return {"finished": earlier}
    if earlier is not None and "exit_code" in earlier:
        if again:
            asked = earlier["state"] == "interrupted"
            why = "it was asked to stop" if asked else "it would end so again"
            raise FailedBefore(f"Not started again, as {why}: {earlier['why']}", earlier["exit_code"])
        # A restart before this start has come to its first step must not take the end of an earlier one for its own.
        write_state(run_dir, **{name: each for name, each in earlier.items() if name != "exit_code"})
    if earlier is not None and earlier["state"] == "failed":
        say(f"{run_dir} failed before: {earlier.get('why', 'it did not say why')}")
    if again and (refused := refused_before(run_dir)) is not None:
        raise refused
    forget_refusal(run_dir)
    run_directory.clean(run_dir)
    return {"begun": begun, "made": made}


def _prepare(
    run: Run, run_dir: Path, ranks: Ranks, open_feed: OpenFeed, stack: ExitStack, *, resume: bool, say: Say
) -> tuple[TrainingState, Feed, DeviceMesh | None]:
    """Model, optimizer and feed as they begin, or as the newest valid checkpoint holds them."""
    device = ranks.device
    mesh = None if ranks.size == 1 else mesh_of(run.layout, device.type)
    part, parts = (0, 1) if mesh is None else (data_rank(run.layout, mesh), run.layout.data_ranks)
    feed = _opened(run, ranks, open_feed, stack, part, parts)
    if feed.tokenizer_definition is not None and ranks.first:
        write_atomically(run_dir / "tokenizer.json", feed.tokenizer_definition)
    for remark in feed.remarks:
        say(remark)
    found = ranks.of_first(lambda: _newest(run, run_dir, feed, say)) if resume else None
    path = None if found is None else run_directory.checkpoints_dir(run_dir) / found
    with memory_told():
        model, together, initial_weights = _model(run, ranks, mesh, fresh=path is None, say=say)
        if run.recipe.documents is not None:
            if feed.end_id is None:
                rule = "needs data that says which token ends a document"
                raise InvalidInput([Problem("recipe.documents", "masked", rule, "none")])
            model.masks.end_id = feed.end_id
        optimizer = (
            optimizer_on_rank(model, run.recipe, together, width_factor=run.width_factor)
            if isinstance(together, RanksTogether)
            else build_optimizer(model, run.recipe, width_factor=run.width_factor)
        )
        if mesh is not None:
            limit_waiting(ranks.seconds)
        scaler = LossScaler(device) if run.recipe.precision.loss_scaling else None
        state = TrainingState(run, run_dir, device, model, optimizer, scaler, together, ranks.rank, part, parts)
        state.initial_weights = initial_weights
        if path is not None:
            ranks.together(lambda: restore(state, path, say))
        elif isinstance(optimizer, MasterWeights):
            optimizer.begin()
        _compare_with_reference(run, model, ranks, mesh, feed)
    if resume and path is None:
        say(f"{run_dir} has no valid checkpoint; the run starts at step 0.")
    if resume:
        ranks.of_first(lambda: run_directory.set_aside(run_dir, state.step if path else -1, say))
    model.train()
    if run.recipe.compile:
        for layer in model.layers:  # in place: one graph serves all blocks, and parameter names stay
            layer.compile()
    return state, feed, mesh


# The first rank opens first: it tokenizes what is not tokenized yet, and the others find the store.
def _opened(run: Run, ranks: Ranks, open_feed: OpenFeed, stack: ExitStack, part: int, parts: int) -> Feed:
    """The feed of a data rank, closed when ``stack`` ends; all ranks must read the same text."""
    feeds: list[Feed] = []

    def opened() -> str:
        if not feeds:
            feeds.append(open_feed(run, ranks.device, rank=part, ranks=parts, progress=ranks.first))
            stack.callback(feeds[0].close)
        return feeds[0].fingerprint

    ranks.of_first(opened)  # the others find what it has read and prepared
    fingerprints = ranks.together(opened)
    other = next((rank for rank, fingerprint in enumerate(fingerprints) if fingerprint != fingerprints[0]), None)
    if other is not None:
        rule = f"is other text on rank {other} than on rank 0; all ranks must see the same files"
        raise InvalidInput([_of_text(run, rule)])
    return feeds[0]


# Other runs' checkpoints are passed over and not refused at once: the run's own may lie beneath them. Where there are
# none of its own, somebody has put others there, and beginning anew beside them would hide that.
def _newest(run: Run, run_dir: Path, feed: Feed, say: Say) -> str | None:
    """The name of the newest valid checkpoint, which must be of this run and its text."""
    others: list[Problem] = []

    def refused(path: Path) -> str | None:
        if (rule := of_another_run(path, run)) is not None:
            others.append(Problem("checkpoint", str(path), rule))
        elif (rule := unlike(path, run)) is None and run_directory.read_facts(path)["data"] != feed.fingerprint:
            rule = "was begun on other text: the corpus or its tokenizer has changed since; put it back or begin anew"
            others.append(_of_text(run, rule))
        return rule

    path = run_directory.latest_valid(run_dir, say, refused)
    if path is None and others:  # somebody has put them there, and the run's own may lie elsewhere
        raise InvalidInput(others[-1:], str(run_dir))
    return None if path is None else path.name


def _of_text(run: Run, rule: str) -> Problem:
    """A problem with what the data is made of."""
    return Problem("data.mixture" if run.data.mixture else "data.path", list(run.data.paths), rule)


# A whole matrix exists on one rank only for the moment in which its values are drawn: each parameter has a generator of
# its own, seeded by the run's seed and its name, so that the model is the same on any layout.
def _model(
    run: Run, ranks: Ranks, mesh: DeviceMesh | None, *, fresh: bool, say: Say
) -> tuple[Transformer, Together, dict[str, str] | None]:
    """The model as this rank holds it, how its ranks take a step together, and the weights that it begins with."""
    seed = derive(run.recipe.seed, "init")
    initial_weights = None
    if mesh is not None:
        model, together = model_on_rank(run, mesh, ranks.device, seed=seed if fresh else None)
        if fresh and run.recipe.initial_weights is not None:
            initial_weights = ranks.together(lambda: start_from(run, model, say))[0]
        return model, together, initial_weights
    with ranks.device:
        model = build_model(run.model, run.recipe, adapted=False)
    if fresh:
        initial_weights = _begun(run, model, say)
    with ranks.device:  # only now, so that frozen weights are stored in their format as they begin
        adapt(model, run.recipe.lora)
    draw(model, seed=derive(run.recipe.seed, "adapters"))
    return model, ALONE, initial_weights


def _begun(run: Run, model: Transformer, say: Say) -> dict[str, str] | None:
    """Give a model the weights that its run begins with; of read ones their file."""
    if run.recipe.initial_weights is not None:
        return start_from(run, model, say)
    initialize(model, seed=derive(run.recipe.seed, "init"), width_factor=run.width_factor)
    return None


# A reference is the model as the run began, a teacher as it was read: no part of a checkpoint, as each start makes it.
def _compare_with_reference(run: Run, model: Transformer, ranks: Ranks, mesh: DeviceMesh | None, feed: Feed) -> None:
    """Put the frozen reference of preferences or a teacher beside a model, or have the feed take its losses once."""
    recipe = run.recipe
    if recipe.objective.reference is None:
        return
    beside = run.reference or (run if recipe.lora is None else None)
    try:
        if beside is not None and mesh is None:
            with ranks.device:
                reference = add_reference(model, beside)
            _begun(beside, reference, lambda sentence: None)
        elif beside is not None and mesh is not None:
            reference = reference_on_rank(beside, model, mesh, ranks.device)
            if beside.recipe.initial_weights is not None:
                ranks.together(lambda: start_from(beside, reference, lambda sentence: None))
    except InvalidInput as error:
        if run.teacher is None:
            raise
        own, named = "recipe.initial_weights", "recipe.objective.teacher_weights"
        problems = [replace(problem, field=problem.field.replace(own, named)) for problem in error.problems]
        raise InvalidInput(problems, error.where.replace(own, named)) from None
    if recipe.objective.reference == "precomputed":
        assert isinstance(feed, Pairs), "only pairs are compared with a reference once"
        with autocast(recipe.precision, ranks.device):
            feed.take_reference(
                lambda inputs, targets: reference_losses(model, inputs, targets, recipe), ranks.together
            )
        model.reference = None


def say_on_stderr(sentence: str) -> None:
    print(printable(sentence), file=unheard(sys.stderr), flush=True)

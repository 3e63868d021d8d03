"""The run: a run file and a feed of batches in, trained weights out, stoppable at any instruction."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.utils.deterministic

from trainledger.data.loader import open_loader
from trainledger.durable import write_atomically
from trainledger.nn.init import initialize
from trainledger.nn.lora import adapt, draw
from trainledger.nn.transformer import Transformer
from trainledger.spec.problem import InvalidInput, Problem, printable
from trainledger.spec.run import Run
from trainledger.spec.runfile import digest
from trainledger.train import checkpoint
from trainledger.train.device import find_device, keep_freed_memory, refuse_launches
from trainledger.train.loop import Say, TrainingLoop, finished_from
from trainledger.train.mixed_precision import LossScaler, MasterWeights
from trainledger.train.observer import Finished, Observer, TrainingState
from trainledger.train.optimizer import build_optimizer
from trainledger.train.precision import build_model, refuse, refuse_products, set_fp32_products
from trainledger.train.run_directory import begin_or_match, locked, read_state
from trainledger.train.step import Feed, OpenFeed, derive
from trainledger.train.stop import memory_told
from trainledger.train.trained import refuse_other_weights, start_from


def train(
    run: Run,
    run_dir: Path,
    *,
    resume: bool = False,
    observers: Sequence[Observer] = (),
    open_feed: OpenFeed = open_loader,
    say: Say | None = None,
) -> Finished:
    """Train a run in its directory to its last step, from its newest valid checkpoint where ``resume``.

    ``open_feed`` brings the batches: by default those of ``run.data``, prepared where they are not yet. A finished
    run is not touched again: with ``resume`` its result is returned. Raises `InvalidInput` where the
    directory holds another run, one that was begun (without ``resume``), one begun on other text, or one that another
    process holds; `Diverged`, `Interrupted`, `CannotSave` or `OutOfMemory` where the run ends early.
    """
    say = say or _say_on_stderr
    if run.cluster.count > 1:
        raise InvalidInput([Problem("cluster.count", run.cluster.count, "the engine trains on one device so far", 1)])
    if not run.layout.alone:
        raise InvalidInput([Problem("layout", None, "takes several devices, and the engine trains on one so far")])
    if run.recipe.checkpoints.asynchronous:
        rule = "is accounted for, but the engine waits until a checkpoint is written"
        raise InvalidInput([Problem("recipe.checkpoints.asynchronous", True, rule, False)])
    refuse(run.recipe.precision, run.recipe)
    device = find_device(run.cluster.backend)
    refuse_launches(run.recipe, str(device))
    refuse_products(run.recipe.precision, device.type)
    with locked(run_dir):
        begun = begin_or_match(run_dir, run)
        earlier = read_state(run_dir)
        if earlier is not None:
            refuse_other_weights(run_dir, earlier.get("initial_weights"))
        if begun and not resume:
            raise InvalidInput([_already(run_dir, earlier)])
        if earlier is not None and earlier["state"] == "finished":
            finished = finished_from(run_dir, earlier)
            if checkpoint.damage(finished.checkpoint) is None:
                say(f"{run_dir} is already finished.")
                return finished
        if earlier is not None and earlier["state"] == "failed":
            say(f"{run_dir} failed before: {earlier.get('why', 'it did not say why')}")
        checkpoint.clean(run_dir)
        with _arithmetic(run, device), ExitStack() as stack:
            feed = open_feed(run, device)
            stack.callback(feed.close)
            if feed.tokenizer_definition is not None:
                write_atomically(run_dir / "tokenizer.json", feed.tokenizer_definition)
            with memory_told():
                state = _prepare(run, run_dir, device, feed, resume=begun, say=say)
            return TrainingLoop(state, feed, observers, say).run(resumed=begun)


def _prepare(run: Run, run_dir: Path, device: torch.device, feed: Feed, *, resume: bool, say: Say) -> TrainingState:
    """Model and optimizer as they begin, or as the newest valid checkpoint holds them."""
    with device:
        model = build_model(run.model, run.recipe, adapted=False)
    path = checkpoint.latest_valid(run_dir, say) if resume else None
    initial_weights = None
    if path is None:
        if run.recipe.initial_weights is None:
            initialize(model, seed=derive(run.recipe.seed, "init"))
        else:
            initial_weights = start_from(run, model, say)
    with device:  # only now, so that frozen weights are stored in their format as they begin
        adapt(model, run.recipe.lora)
    draw(model, seed=derive(run.recipe.seed, "adapters"))
    optimizer = build_optimizer(model, run.recipe)
    scaler = LossScaler(device) if run.recipe.precision.loss_scaling else None
    state = TrainingState(run, run_dir, device, model, optimizer, scaler)
    state.initial_weights = initial_weights
    if path is None:
        if isinstance(optimizer, MasterWeights):
            optimizer.begin()
        if resume:
            say(f"{run_dir} has no valid checkpoint; the run starts at step 0.")
    else:
        facts = checkpoint.read_facts(path)
        if facts["digest"] != digest(run):
            rule = f"is a checkpoint of run {facts['digest'][:8]}, not of {digest(run)[:8]}"
            raise InvalidInput([Problem("checkpoint", str(path), rule)])
        if facts["data"] != feed.fingerprint:
            rule = "was begun on other text: the corpus or its tokenizer has changed since; put it back or begin anew"
            raise InvalidInput([Problem("data.path", list(run.data.path), rule)], str(run_dir))
        checkpoint.load(path, model, optimizer)
        if scaler is not None:
            scaler.restore(facts["loss_scale"])
        for name in ("step", "loss", "validation_loss", "seconds"):
            setattr(state, name, facts[name])
        state.initial_weights = facts.get("initial_weights")
        if facts["threads"] != torch.get_num_threads():
            threads = f"{facts['threads']} threads and goes on with {torch.get_num_threads()}"
            say(f"{path.name} was made with {threads}: the last bits may differ.")
    if resume:
        checkpoint.set_aside(run_dir, state.step if path else -1, say)
    model.train()
    if run.recipe.compile:
        _compile(model)
    return state


def _compile(model: Transformer) -> None:
    """Compile each block in place: one graph serves all blocks, and parameter names stay."""
    for layer in model.layers:
        layer.compile()


@contextmanager
def _arithmetic(run: Run, device: torch.device) -> Iterator[None]:
    """The process-wide switches under which a run's numbers come out the same each time."""
    set_fp32_products(run.recipe.precision)
    if device.type == "cpu":
        keep_freed_memory()
    if not (run.recipe.compiles and device.type == "cpu"):
        yield
        return
    # Compiled CPU kernels add up in an order that depends on timing by default; eager ones do not.
    before = torch.are_deterministic_algorithms_enabled()
    filling: Any = torch.utils.deterministic
    filled = filling.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    filling.fill_uninitialized_memory = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)
        filling.fill_uninitialized_memory = filled


def _already(run_dir: Path, earlier: dict[str, Any] | None) -> Problem:
    """Why a begun run is not begun again."""
    if earlier is not None and earlier["state"] == "finished":
        return Problem("run directory", str(run_dir), f"is already finished ({earlier['step']} steps)")
    if earlier is not None and earlier["state"] == "failed":
        rule = f"holds this run, which failed: {earlier.get('why', 'it did not say why')} --resume tries again"
        return Problem("run directory", str(run_dir), rule)
    return Problem("run directory", str(run_dir), "holds this run, begun and not finished; --resume goes on with it")


def _say_on_stderr(sentence: str) -> None:
    print(printable(sentence), file=sys.stderr, flush=True)

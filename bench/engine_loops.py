"""One way to train the model of ``bench/engine.py``, in a process of its own that takes steps when it is its turn.

    python bench/engine_loops.py LOOP FOLDER          # started by bench/engine.py

Each loop is what its project's users run: the engine as `trainledger train` runs it, with metrics, progress and its own
data; a bare loop of the same model; transformers' Trainer; nanoGPT's and litgpt's model in the loop of their training
scripts. All train a GPT-2 of the same sizes on the same bytes, in fp32.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from trainledger.engine.data.prepare import prepare
from trainledger.engine.nn.init import initialize
from trainledger.engine.train.observer import Observer, StepRecord
from trainledger.engine.train.precision import build_model
from trainledger.observe.measure.hardware import Pace, Sample, watched
from trainledger.spec.run import Run
from trainledger.spec.runfile import read

WARM_UP_STEPS = 6
LEARNING_RATE, BETAS, WEIGHT_DECAY, CLIP = 1e-3, (0.9, 0.95), 0.1, 1.0
Batches = Iterator[tuple[Tensor, Tensor]]


class Turns:
    """Steps are taken when bench/engine.py says so: after each turn it is told how long each step took."""

    def __init__(self, folder: Path) -> None:
        self.steps_in_a_turn = int(os.environ["STEPS_IN_A_TURN"])
        self.left = WARM_UP_STEPS
        self.timer: AbstractContextManager[Sample] | None = None
        self.sample: Sample | None = None
        self.steps: list[dict[str, Any]] = []
        self.pace = None if "RANK" in os.environ else Pace()  # ranks share the cores
        if os.environ.get("RANK", "0") == "0":
            connection = socket.socket(socket.AF_UNIX)
            connection.connect(str(folder / "turns"))
            self.line = connection.makefile("rw")
        else:
            self.left = sys.maxsize  # the first rank keeps time

    def step_done(self) -> None:
        """Called by a loop after each step."""
        if self.timer is not None and self.sample is not None:
            self.timer.__exit__(None, None, None)
            one = self.sample
            self.steps.append({"seconds": one.seconds, "crowded": one.crowded, "pace": one.pace_seconds})
        self.left -= 1
        if not self.left:
            self.line.write(json.dumps(self.steps) + "\n")
            self.line.flush()
            if self.line.readline() != "go\n":
                os._exit(0)
            self.left, self.steps = self.steps_in_a_turn, []
        if hasattr(self, "line"):
            self.timer = watched(torch.get_num_threads(), pace=self.pace)
            self.sample = self.timer.__enter__()


class AfterEachStep(Observer):
    """Gives the turn on between the engine's steps."""

    def __init__(self, turns: Turns) -> None:
        self.turns = turns

    def on_step_end(self, record: StepRecord) -> None:
        self.turns.step_done()


def engine(run: Run, folder: Path, turns: Turns) -> None:
    """The engine, as `trainledger train` runs it."""
    from trainledger.answers.closed_loop import run_closed_loop
    from trainledger.engine.train.progress import Progress, TensorBoard

    run_dir = folder / f"engine-{os.environ.get('WORLD_SIZE', '1')}"
    run_closed_loop(run, run_dir, observers=[Progress(), TensorBoard(print), AfterEachStep(turns)])


def bare(run: Run, folder: Path, turns: Turns) -> None:
    """The engine's model in the loop that a person would write."""
    model = build_model(run.model, run.recipe)
    initialize(model, seed=0)
    if run.recipe.compile:
        for layer in model.layers:
            layer.compile()
    _written_out(model, model, batches(run), turns)


def bare_fsdp2(run: Run, folder: Path, turns: Turns) -> None:
    """The engine's model in a hand-written loop, sharded by FSDP2 block by block."""
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo")
    model = build_model(run.model, run.recipe, sharded=True)
    initialize(model, seed=0)
    for layer in model.layers:
        if run.recipe.compile:
            layer.compile()
        fully_shard(layer)
    fully_shard(model)
    half = run.recipe.global_batch // dist.get_world_size()
    _written_out(model, model, batches(run, half, seed=dist.get_rank()), turns)


def _written_out(model: nn.Module, forward: Callable[[Tensor], Tensor], data: Batches, turns: Turns) -> None:
    decayed = [each for each in model.parameters() if each.ndim >= 2]
    others = [each for each in model.parameters() if each.ndim < 2]
    groups = [{"params": decayed, "weight_decay": WEIGHT_DECAY}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=LEARNING_RATE, betas=BETAS, fused=True)
    for inputs_BT, targets_BT in data:
        loss = nn.functional.cross_entropy(forward(inputs_BT).flatten(0, 1), targets_BT.flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        loss.item()  # somebody looks at it
        turns.step_done()


def trainer(run: Run, folder: Path, turns: Turns) -> None:
    """transformers' GPT-2 in its Trainer."""
    from transformers import AutoModelForCausalLM, GPT2Config, TrainerCallback, TrainingArguments
    from transformers import Trainer as Theirs

    spec, rows = run.model, next(batches(run, 4096))[0]

    class TurnAfterStep(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, *args: Any, **more: Any) -> None:
            turns.step_done()

    config = GPT2Config(
        vocab_size=spec.vocab_size, n_positions=spec.max_seq_len, n_embd=spec.d_model, n_layer=spec.n_layers,
        n_head=spec.attention.n_heads, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False,
    )  # fmt: skip
    arguments = TrainingArguments(
        output_dir=str(folder / "trainer"), per_device_train_batch_size=run.recipe.global_batch, max_steps=10**6,
        learning_rate=LEARNING_RATE, weight_decay=WEIGHT_DECAY, adam_beta2=BETAS[1], max_grad_norm=CLIP,
        logging_steps=10, save_strategy="no", report_to=[], use_cpu=True, torch_compile=run.recipe.compile,
        disable_tqdm=True,
    )  # fmt: skip
    dataset: Any = [{"input_ids": each, "labels": each} for each in rows]
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    Theirs(model=model, args=arguments, train_dataset=dataset, callbacks=[TurnAfterStep()]).train()


def nanogpt(run: Run, folder: Path, turns: Turns) -> None:
    """nanoGPT's model in the loop of its train.py; the directory with its model.py is in NANOGPT."""
    sys.path.insert(0, os.environ["NANOGPT"])
    from model import GPT, GPTConfig

    spec = run.model
    config = GPTConfig(
        block_size=spec.max_seq_len, vocab_size=spec.vocab_size, n_layer=spec.n_layers, n_head=spec.attention.n_heads,
        n_embd=spec.d_model, dropout=0.0, bias=True,
    )  # fmt: skip
    model = GPT(config)
    optimizer = model.configure_optimizers(WEIGHT_DECAY, LEARNING_RATE, BETAS, "cpu")
    called = torch.compile(model) if run.recipe.compile else model
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    for inputs_BT, targets_BT in batches(run):
        _, loss = called(inputs_BT, targets_BT)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        loss.item()
        turns.step_done()


def litgpt(run: Run, folder: Path, turns: Turns) -> None:
    """litgpt's model by Lightning Fabric, in the loop of its pretrain.py."""
    from lightning.fabric import Fabric
    from litgpt import GPT, Config
    from litgpt.utils import chunked_cross_entropy

    spec = run.model
    fabric = Fabric(accelerator="cpu", devices=1, precision="32-true")
    config = Config(
        block_size=spec.max_seq_len, vocab_size=spec.vocab_size, padded_vocab_size=spec.vocab_size,
        n_layer=spec.n_layers, n_head=spec.attention.n_heads, n_embd=spec.d_model, bias=True, rotary_percentage=1.0,
        parallel_residual=False, norm_class_name="LayerNorm", mlp_class_name="GptNeoxMLP",
        intermediate_size=spec.feed_forward.d_ff, lm_head_bias=False,
    )  # fmt: skip
    model: Any = GPT(config)
    model.max_seq_length = run.recipe.seq_len
    model = torch.compile(model) if run.recipe.compile else model
    model = fabric.setup(model)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=LEARNING_RATE, betas=BETAS, weight_decay=WEIGHT_DECAY, fused=True
    )
    optimizer = fabric.setup_optimizers(optimizer)
    for inputs_BT, targets_BT in batches(run):
        loss = chunked_cross_entropy(model(inputs_BT), targets_BT, chunk_size=0)
        fabric.backward(loss)
        fabric.clip_gradients(model, optimizer, max_norm=CLIP)
        optimizer.step()
        optimizer.zero_grad()
        loss.item()
        turns.step_done()


def batches(run: Run, rows: int | None = None, seed: int = 0) -> Batches:
    """Rows of the corpus at random places, read from the memory-mapped file as nanoGPT's get_batch does."""
    store = prepare(run.data, vocab_size=run.model.vocab_size, progress=False)
    tokens = store.train.read(0, store.train.tokens).astype(np.uint16)
    length, drawn = run.recipe.seq_len, np.random.default_rng(seed)
    while True:
        starts = drawn.integers(0, len(tokens) - length - 1, rows or run.recipe.global_batch)
        both = torch.from_numpy(np.stack([tokens[each : each + length + 1] for each in starts]).astype(np.int64))
        yield both[:, :-1].contiguous(), both[:, 1:].contiguous()


LOOPS = {each.__name__: each for each in (engine, bare, bare_fsdp2, trainer, nanogpt, litgpt)}

if __name__ == "__main__":
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    here = Path(sys.argv[2])
    LOOPS[sys.argv[1]](read(here / f"run-{os.environ.get('WORLD_SIZE', '1')}.toml"), here, Turns(here))

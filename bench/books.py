"""Do the books of a run balance: 12 runs of the engine and four loops of others, each forecast, metered, reconciled.

``OMP_NUM_THREADS=1 python bench books``: measures this machine first, then prints a row for each: the sum of the
phases over the step, measured over predicted step time, the category of memory that is furthest from the forecast, the
seconds and the bytes that nothing explains. A run of which most steps were disturbed (other processes, or a processor
below its full speed, as a core shared with another virtual machine) is made again, and the one of five with the fewest
disturbed steps counts; so does a calibration. Six minutes on a quiet machine.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import trainledger as tl
from trainledger.answers.closed_loop import run_closed_loop
from trainledger.answers.pages.record import RunRecord, read_run
from trainledger.ledger.measured import BUSY
from trainledger.observe.measure.machine import measure_machine
from trainledger.spec.calibration import write_calibration

STEPS = 40
TRIES = 5
LEAST_OF_PEAK = 0.01  # a smaller category says little
MODEL = {
    "name": "books", "vocab_size": 1024, "d_model": 192, "n_layers": 4, "max_seq_len": 128,
    "attention": {"n_heads": 6}, "feed_forward": {"d_ff": 768},
}  # fmt: skip
RECIPE = {"seq_len": 128, "global_batch": 8, "steps": STEPS, "evaluation": {"every": STEPS, "sequences": 8}}
CHANGES: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16 autocast": {"recipe.precision": "bf16-mixed"},
    "four micro-batches": {"recipe.micro_batch": 2},
    "blocks again in backward": {"recipe.activation_checkpointing": "full"},
    "attention again in backward": {"recipe.activation_checkpointing": "selective"},
    "bf16, blocks again": {"recipe.precision": "bf16-mixed", "recipe.activation_checkpointing": "full"},
    "chunked loss": {"recipe.loss": "chunked"},
    "dropout": {"recipe.dropout": 0.1},
    "grouped queries": {"model.attention.n_kv_heads": 2},
    "tied embeddings": {"model.tie_embeddings": True},
    "plain SGD": {"recipe.optimizer": "sgd"},
    "compiled blocks": {"recipe.compile": True},
}


def engine(name: str, folder: Path, corpus: Path) -> RunRecord:
    """A run of the engine in a directory of its own."""
    data = {"path": str(corpus / "*.txt"), "tokenizer": "bpe", "validation_fraction": 0.1}
    cluster = {"device": "this-machine", "backend": "cpu"}
    run = tl.load({"model": MODEL, "recipe": RECIPE, "data": data, "cluster": cluster}, CHANGES[name])
    where = folder / name.replace(" ", "-")
    run_closed_loop(run, where, preflight=False)
    return read_run(where)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.lstm, self.head = (
            nn.Embedding(512, 128),
            nn.LSTM(128, 256, 2, batch_first=True),
            nn.Linear(256, 512),
        )

    def forward(self, tokens_BT: Tensor) -> Tensor:
        logits_BTV: Tensor = self.head(self.lstm(self.embed(tokens_BT))[0])
        return logits_BTV


class Mixer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(512, 256)
        self.over_time, self.over_width, self.head = nn.Linear(64, 64), nn.Linear(256, 256), nn.Linear(256, 512)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        x_BTD = self.embed(tokens_BT)
        x_BTD = x_BTD + self.over_time(x_BTD.transpose(1, 2)).transpose(1, 2)
        logits_BTV: Tensor = self.head(F.gelu(self.over_width(x_BTD)))
        return logits_BTV


class Logits(nn.Module):
    """A model of transformers that gives its logits."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens_BT: Tensor) -> Tensor:
        logits_BTV: Tensor = self.model(tokens_BT).logits
        return logits_BTV


def _of_transformers(llama: bool) -> nn.Module:
    import transformers

    if llama:
        config: Any = transformers.LlamaConfig(
            vocab_size=512, hidden_size=128, intermediate_size=384, num_hidden_layers=3, num_attention_heads=4,
            num_key_value_heads=2, use_cache=False,
        )  # fmt: skip
        return Logits(transformers.LlamaForCausalLM(config))
    config = transformers.GPT2Config(vocab_size=512, n_embd=128, n_layer=3, n_head=4, n_positions=64, use_cache=False)
    return Logits(transformers.GPT2LMHeadModel(config))


LOOPS: dict[str, Callable[[], nn.Module]] = {
    "LSTM": Recurrent,
    "mixer": Mixer,
    "transformers' GPT-2": lambda: _of_transformers(llama=False),
    "transformers' Llama": lambda: _of_transformers(llama=True),
}


def _loss(logits_BTV: Tensor, targets_BT: Tensor) -> Tensor:
    return F.cross_entropy(logits_BTV.flatten(0, 1), targets_BT.flatten())


def others(name: str, folder: Path) -> tuple[RunRecord, Mapping[str, int]]:
    """A loop that a person would write, metered; and the peak by category of its trace on fake tensors."""
    torch.manual_seed(0)
    model = LOOPS[name]()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batches = [(torch.randint(0, 512, (8, 64)), torch.randint(0, 512, (8, 64))) for _ in range(STEPS)]
    where = folder / name.replace(" ", "-").replace("'", "")
    with tl.meter_loop(model, optimizer, where, deep=4, say=lambda sentence: None) as meter:
        for inputs_BT, targets_BT in meter.data(batches):
            loss = _loss(model(inputs_BT), targets_BT)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            meter.log(loss=loss)
    traced = tl.trace(model, batches[0][0], loss=_loss, label=batches[0][1], optimizer=optimizer)
    return read_run(where), traced.peak().by_category


def row(record: RunRecord, predicted: Mapping[str, int], measured: Mapping[str, int]) -> dict[str, Any]:
    """What is said of one run."""
    rows = record.reconciliation
    step, peak = rows["step_seconds"], sum(measured.values())
    phases = [sum(each["phase_seconds"].values()) / each["seconds"] for each in record.steps if each["phase_seconds"]]
    furthest = max(
        (abs(measured.get(name, 0) / nbytes - 1), name)
        for name, nbytes in predicted.items()
        if nbytes > LEAST_OF_PEAK * peak
    )
    found: dict[str, Any] = {
        "phases": median(phases), "step ratio": step.ratio, "memory": furthest[0], "of": furthest[1],
        "unexplained time": float(step.unexplained or 0) / (step.measured or 1),
        "unexplained bytes": sum(measured.values()) / max(sum(predicted.values()), 1) - 1,
    }  # fmt: skip
    times = record.measured.step_seconds
    found["busy"] = any(BUSY in each for each in record.measured.notes)
    found["steps disturbed"] = times.discarded if times and (times.discarded or not found["busy"]) else STEPS
    allocator = next((each for each in rows.rows if each.quantity == "allocator_peak_nbytes"), None)
    if allocator is not None and allocator.unexplained is not None:
        found["unexplained bytes"] = float(allocator.unexplained) / float(allocator.predicted or 1)
    return found


def books(folder: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    for name in (*CHANGES, *LOOPS):
        tries = []
        for again in range(TRIES):
            where = folder / str(again)
            if name in CHANGES:
                record = engine(name, where, folder / "corpus")
                told = record.forecast.peak_by_category if record.forecast is not None else {}
            else:
                record, told = others(name, where)
            tries.append(row(record, told, record.measured.peak_by_category))
            if not tries[-1]["busy"]:
                break
            print(name, "disturbed", json.dumps(tries[-1]), flush=True)
        yield name, min(tries, key=lambda each: each["steps disturbed"])


def calibrate(path: Path) -> None:
    tries = []
    for _ in range(TRIES):
        tries.append(measure_machine("cpu"))
        print(f"{tries[-1].discarded} of {tries[-1].samples} samples disturbed", *tries[-1].notes, sep="; ", flush=True)
        if not tries[-1].busy:
            break
    write_calibration(min(tries, key=lambda each: each.discarded / each.samples), path)


def main() -> None:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        (folder / "corpus").mkdir()
        for number in range(300):
            text = f"{number} times {number} is {number**2}, they say, and {number + 1} comes after it. " * 25
            (folder / "corpus" / f"{number}.txt").write_text(text)
        os.environ["TRAINLEDGER_CALIBRATION"] = str(folder / "machine.toml")
        calibrate(folder / "machine.toml")
        found = {}
        for name, each in books(folder):
            found[name] = each
            print(name, json.dumps(each), flush=True)
        quiet = [each for each in found.values() if not each["busy"]]
        for runs, which in ((list(found.values()), "all runs"), (quiet, "those not mostly disturbed")):
            ratios = [each["step ratio"] for each in runs] or [float("nan")]
            print(f"step time of {len(runs)} runs ({which}), measured over predicted: median {median(ratios):.3f}, "
                  f"median error {median(abs(each - 1) for each in ratios):.3f}", file=sys.stderr)  # fmt: skip


if __name__ == "__main__":
    main()

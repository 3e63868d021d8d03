"""The runs whose ledgers, plans, searches and traces are frozen."""

import shlex
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import date
from pathlib import Path
from typing import Any

import trainledger as tl
from golden import answer, ledger_digest
from trainledger import catalog
from trainledger.ledger.ranks import accounts
from trainledger.ledger.step import account

Case = tuple[str, list[str], str]  # a model of the catalog, overrides, the kernels' backend


def _cases(name: str) -> dict[str, list[str]]:
    """A table of golden_cases.toml, each text as its words."""
    return {case: shlex.split(text) for case, text in _WRITTEN[name].items()}


_WRITTEN = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
RECIPES, MORE_RECIPES, LAYOUTS = _cases("recipes"), _cases("more_recipes"), _cases("layouts")
LAYOUT_RECIPES, SPREAD_MODELS = _cases("layout_recipes"), _cases("spread_models")
PLANS, SEARCHES = _cases("plans"), _cases("searches")
# Every key and value of these answers is frozen, with those of `PLANS`; `golden.leaves` says how.
ANSWERS = _cases("answers")
WHOLE = ["recipe.seq_len=256", "recipe.global_batch=4", "recipe.steps=10"]

# PyTorch's fused attention has neither capped scores nor sinks.
WRITTEN_OUT = ["recipe.attention=math"]
CAPPED = ("gemma-2-2b", "gemma-2-9b", "gemma-2-27b", "gpt-oss-20b", "gpt-oss-120b")
FEW = ("gpt2", "llama-3-8b", "gemma-2-9b", "mixtral-8x7b", "deepseek-v2-lite", "bloom", "gpt-oss-20b")
SPREAD = ["recipe.seq_len=512", "recipe.global_batch=64", "recipe.micro_batch=1", "recipe.steps=10"]


def _ledgers() -> Iterator[tuple[str, Case]]:
    before = date(2026, 11, 21)  # of the files: models that the catalog got later are not in them
    for model in [each for each in catalog.model_names() if catalog.model_entry(each)["date"] < before]:
        for name, recipe in RECIPES.items():
            words = [*WHOLE, *(WRITTEN_OUT if model in CAPPED else []), *recipe]
            yield f"{model} | {name}", (model, words, "cpu")
            if model in FEW:
                yield f"{model} | {name} | cuda", (model, words, "cuda")
    for model in FEW:
        for name, recipe in MORE_RECIPES.items():
            words = [*WHOLE, *(WRITTEN_OUT if model in CAPPED else []), *recipe]
            yield f"{model} | {name}", (model, words, "cuda" if model == "gpt2" else "cpu")
    for model in SPREAD_MODELS:
        for layout, words in LAYOUTS.items():
            for name, recipe in LAYOUT_RECIPES.items():
                own = [*SPREAD, *SPREAD_MODELS[model], *recipe, *words]
                yield f"{model} | {layout} | {name}", (model, own, "cuda")


LEDGERS: dict[str, Case] = dict(_ledgers())


def ranks_of(case: Case) -> Iterable[Any]:
    """The ledgers of the distinct ranks of a case."""
    model, overrides, backend = case
    devices = 1
    for each in overrides:
        name, _, value = each.partition("=")
        if name in ("layout.replicate", "layout.shard", "layout.tensor", "layout.pipeline", "layout.context"):
            devices *= int(value)
    run = tl.load({"model": {"preset": model}}, [*overrides, f"cluster.count={devices}"])
    if devices == 1:
        return [account(run, backend=backend)]
    return [each.ledger for each in accounts(run, backend=backend)]


def ledger_of(case: Case, words: Mapping[str, str]) -> Any:
    """The digests of a case's ledgers, or "refused" where the run breaks a rule."""
    try:
        return [ledger_digest(each, words) for each in ranks_of(case)]
    except tl.InvalidInput:
        return "refused"


def search_of(words: list[str]) -> Any:
    """The first three layouts of a search and the simplest, each as ``--set`` takes it, with its step and memory."""
    found = answer([*words, "--set", "layout.auto=true"])
    best = [*found["ranked"][:3], found["simplest"]]
    return [[sorted(each["set"]), float(f"{each['step_seconds']:.9g}"), each["device_nbytes"]] for each in best]


def _perceptron() -> Any:
    import torch
    from torch import nn

    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.LayerNorm(256), nn.Dropout(0.1), nn.Linear(256, 10))
    return tl.trace(model, (torch.zeros(32, 64),), loss=torch.sum, optimizer=torch.optim.AdamW(model.parameters()))


def _convolutions() -> Any:
    import torch
    from torch import nn

    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(inplace=True), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, stride=2), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10),
    )  # fmt: skip
    return tl.trace(model, (torch.zeros(8, 3, 32, 32),), loss=torch.sum, optimizer=torch.optim.SGD(model.parameters()))


def _transformer() -> Any:
    import torch
    from torch import nn

    model = nn.Transformer(d_model=32, nhead=4, num_encoder_layers=2, num_decoder_layers=2, dim_feedforward=64)
    batch = {"src": torch.zeros(10, 4, 32), "tgt": torch.zeros(9, 4, 32)}
    return tl.trace(model, batch, loss=torch.mean, optimizer=torch.optim.Adam(model.parameters()))


def _llama() -> Any:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=128, hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64,
    )  # fmt: skip
    model, ids = LlamaForCausalLM(config), torch.zeros(2, 16, dtype=torch.int64)
    return tl.trace(
        model, {"input_ids": ids, "labels": ids}, loss=lambda output: output.loss,
        optimizer=torch.optim.AdamW(model.parameters(), fused=True),
    )  # fmt: skip


def _recurrent() -> Any:
    import torch
    from torch import nn

    class Reader(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.lstm, self.head = nn.Embedding(50, 16), nn.LSTM(16, 24, 2), nn.Linear(24, 50)

        def forward(self, ids: Any) -> Any:
            return self.head(self.lstm(self.embedding(ids))[0])

    model = Reader()
    return tl.trace(model, (torch.zeros(7, 3, dtype=torch.int64),), loss=torch.sum,
                    optimizer=torch.optim.RMSprop(model.parameters()))  # fmt: skip


TRACES: dict[str, Callable[[], Any]] = {
    "perceptron": _perceptron, "convolutions": _convolutions, "transformer": _transformer, "llama": _llama,
    "recurrent": _recurrent,
}  # fmt: skip


def trace_of(make: Callable[[], Any], words: Mapping[str, str]) -> Any:
    import torch

    torch.manual_seed(0)
    return ledger_digest(make(), words)

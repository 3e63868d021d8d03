"""The runs whose ledgers, plans, searches and traces are frozen."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import date
from typing import Any

import trainledger as tl
from golden import answer, ledger_digest
from trainledger import catalog
from trainledger.ledger.ranks import accounts
from trainledger.ledger.step import account

Case = tuple[str, list[str], str]  # a model of the catalog, overrides, the kernels' backend

RECIPES: dict[str, list[str]] = {
    "default": [],
    "mixed, full": ["recipe.precision=bf16-mixed", "recipe.activation_checkpointing=full", "recipe.micro_batch=2"],
    "selective, fused loss": ["recipe.activation_checkpointing=selective", "recipe.loss=fused"],
    "math attention, dropout, chunked loss": [
        "recipe.attention=math", "recipe.dropout=0.1", "recipe.attention_dropout=0.1", "recipe.loss=chunked",
    ],
    "compiled": ["recipe.compile=true", "recipe.precision=bf16-mixed"],
    "fp8, segments": ["recipe.precision=fp8-tensorwise", "recipe.activation_checkpointing=segments"],
}  # fmt: skip
WHOLE = ["recipe.seq_len=256", "recipe.global_batch=4", "recipe.steps=10"]

# PyTorch's fused attention has neither capped scores nor sinks.
WRITTEN_OUT = ["recipe.attention=math"]
CAPPED = ("gemma-2-2b", "gemma-2-9b", "gemma-2-27b", "gpt-oss-20b", "gpt-oss-120b")
FEW = ("gpt2", "llama-3-8b", "gemma-2-9b", "mixtral-8x7b", "deepseek-v2-lite", "bloom", "gpt-oss-20b")
OPTIMIZERS = (
    "adam", "adamw", "adamw-8bit", "sgd", "momentum", "adagrad", "rmsprop", "adafactor", "lion", "muon", "nesterov",
    "adam-8bit",
)  # fmt: skip
MORE_RECIPES: dict[str, list[str]] = {
    **{f"optimizer {each}": [f"recipe.optimizer={each}"] for each in OPTIMIZERS},
    **{
        f"optimizer {each} {loop}": [f"recipe.optimizer={each}", f"recipe.optimizer.implementation={loop}"]
        for each in ("adamw", "sgd", "lion", "adagrad", "rmsprop")
        for loop in ("foreach", "loop")
    },
    "amsgrad": ["recipe.optimizer.amsgrad=true"],
    "rmsprop centred": ["recipe.optimizer=rmsprop", "recipe.optimizer.centered=true", "recipe.optimizer.momentum=0.9"],
    "fp16 mixed": ["recipe.precision=fp16-mixed"],
    "bf16 with master weights": [
        "recipe.precision=bf16", "recipe.precision.master_weights=true", "recipe.precision.gradient_dtype=fp32",
        "recipe.precision.moment_dtype=bf16",
    ],
    "fp8 rowwise": ["recipe.precision=fp8-rowwise"],
    "fp8 block": ["recipe.precision=fp8-block"],
    "fp8 weights cast once": ["recipe.precision=fp8-tensorwise", "recipe.precision.weight_caching=true"],
    "every second block": ["recipe.activation_checkpointing=full", "recipe.activation_checkpointing.every=2"],
    "attention again": ["recipe.activation_checkpointing=attention", "recipe.attention=math"],
    "offload": ["recipe.activation_checkpointing=offload"],
    "from the start": ["recipe.activation_checkpointing=from-start"],
    "segments of 3": ["recipe.activation_checkpointing=segments", "recipe.activation_checkpointing.n_blocks=3"],
    "selective by name": [
        "recipe.activation_checkpointing=selective", "recipe.activation_checkpointing.keep=[attention]",
        "recipe.activation_checkpointing.every=3",
    ],
    "compiled, selective": [
        "recipe.compile=true", "recipe.precision=bf16-mixed", "recipe.activation_checkpointing=selective",
    ],
    "compiled loss": ["recipe.loss=compiled", "recipe.precision=bf16-mixed"],
    "lora": ["recipe.lora.rank=16", "recipe.precision=bf16-mixed", "recipe.lora.dropout=0.1"],
    "qlora": ["recipe.lora.rank=16", "recipe.precision=bf16", "recipe.lora.base_format=nf4"],
    "capacity": ["recipe.expert_dispatch=capacity", "recipe.load_balance_loss=0.01"],
    "no clipping": ["recipe.grad_clip="],
    "two predicted ahead": ["model.n_mtp_layers=2"],
}  # fmt: skip

LAYOUTS: dict[str, list[str]] = {
    "ddp": ["layout.replicate=8"],
    "zero 1": ["layout.shard=8", "layout.zero=1"],
    "zero 2": ["layout.shard=8", "layout.zero=2"],
    "fsdp": ["layout.shard=8"],
    "hsdp": ["layout.shard=4", "layout.replicate=2", "layout.reshard_after_forward=false"],
    "fsdp by tensor, no prefetch": ["layout.shard=8", "layout.gather=tensor", "layout.prefetch=0"],
    "tensor": ["layout.tensor=4"],
    "sequence": ["layout.tensor=4", "layout.sequence_parallel=true", "layout.shard=2"],
    "sequence again": ["layout.tensor=4", "layout.sequence_parallel=true", "layout.sequence_gather=again"],
    "pipeline": ["layout.pipeline=4"],
    "gpipe": ["layout.pipeline=4", "layout.schedule=gpipe"],
    "interleaved": ["layout.pipeline=2", "layout.schedule=interleaved", "layout.virtual_stages=2"],
    "zero-bubble": ["layout.pipeline=4", "layout.schedule=zero-bubble"],
    "ring": ["layout.context=4"],
    "all-to-all": ["layout.context=4", "layout.context_kind=all-to-all"],
    "experts": ["layout.shard=8", "layout.expert=4"],
    "3d": ["layout.shard=4", "layout.tensor=2", "layout.pipeline=2", "layout.split_sends=true"],
    "4d": ["layout.shard=2", "layout.tensor=2", "layout.pipeline=2", "layout.context=2"],
    "4d with experts": [
        "layout.shard=2",
        "layout.tensor=2",
        "layout.pipeline=2",
        "layout.context=2",
        "layout.expert=2",
    ],
}
LAYOUT_RECIPES: dict[str, list[str]] = {
    "mixed": ["recipe.precision=bf16-mixed"],
    "sharded, full": ["recipe.precision=bf16-sharded", "recipe.activation_checkpointing=full"],
    "sharded, selective": ["recipe.precision=bf16-sharded", "recipe.activation_checkpointing=selective"],
}
SPREAD = ["recipe.seq_len=512", "recipe.global_batch=64", "recipe.micro_batch=1", "recipe.steps=10"]
SPREAD_MODELS: dict[str, list[str]] = {
    "gpt2": ["model.vocab_multiple=64"],
    "llama-3-8b": [],
    "mixtral-8x7b": [],
    "deepseek-v2-lite": ["model.n_layers=28"],
    "gemma-2-9b": ["recipe.attention=flash", "model.n_layers=44"],
}


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


def _sets(*overrides: str) -> list[str]:
    return [word for override in overrides for word in ("--set", override)]


def _plan(model: str, device: str, count: int, *more: str) -> list[str]:
    return ["plan", model, "--device", device, "--count", str(count), *_sets(*more)]


_8B = ["recipe.tokens=100B", "recipe.global_batch=256", "recipe.micro_batch=1", "recipe.precision=bf16-sharded"]
_MONEY = ["cluster.price_per_device_hour=2.5"]
PLANS: dict[str, list[str]] = {
    "gpt2 on one a100": _plan("gpt2", "a100-sxm-80gb", 1, "recipe.tokens=10B", "recipe.global_batch=512",
                              "recipe.micro_batch=16"),
    "gpt2 on one v100": _plan("gpt2", "v100-sxm-32gb", 1, "recipe.tokens=1B", "recipe.global_batch=64",
                              "recipe.micro_batch=8", "recipe.precision=fp16-mixed"),
    "8b on 64 h100": _plan("llama-3-8b", "h100-sxm", 64, *_8B, *_MONEY, "layout.shard=64"),
    "8b on 64 a100, hsdp, full": _plan("llama-3-8b", "a100-sxm-80gb", 64, *_8B, "layout.shard=8", "layout.replicate=8",
                                       "recipe.activation_checkpointing=full"),
    "8b on 64 h100, tensor, pipeline": _plan("llama-3-8b", "h100-sxm", 64, *_8B, "layout.shard=8", "layout.tensor=4",
                                             "layout.pipeline=2", "layout.sequence_parallel=true"),
    "8b in fp8 on b200": _plan("llama-3-8b", "b200", 32, *_8B, "recipe.precision=fp8-tensorwise-sharded",
                               "layout.shard=32", "recipe.compile=true"),
    "8b at 32K on h100, ring": _plan("llama-3.1-8b", "h100-sxm", 32, *_8B, "recipe.seq_len=32768", "layout.shard=8",
                                     "layout.context=4", "recipe.activation_checkpointing=full"),
    "70b on 1024 h100": _plan("llama-3-70b", "h100-sxm", 1024, "recipe.tokens=15T", "recipe.global_batch=2048",
                              "recipe.micro_batch=1", "recipe.precision=bf16-sharded",
                              "recipe.activation_checkpointing=full", "layout.shard=1024", *_MONEY),
    "405b on 18432 h100": _plan("llama-3.1-405b", "h100-sxm", 18432, "recipe.seq_len=8192", "recipe.global_batch=2048",
                                "recipe.micro_batch=1", "recipe.precision=bf16-sharded", "recipe.steps=1000",
                                "recipe.activation_checkpointing=full", "layout.shard=128", "layout.tensor=8",
                                "layout.pipeline=18", "layout.sequence_parallel=true"),
    "mixtral on 64 h100": _plan("mixtral-8x7b", "h100-sxm", 64, "recipe.seq_len=4096", "recipe.steps=1000",
                                "recipe.global_batch=256", "recipe.micro_batch=1", "recipe.precision=bf16-sharded",
                                "layout.shard=64", "layout.expert=8", "recipe.activation_checkpointing=full"),
    "deepseek-v3 on 2048 h800": _plan("deepseek-v3", "h800-sxm", 2048, "recipe.seq_len=4096", "recipe.steps=1000",
                                      "recipe.global_batch=15360", "recipe.micro_batch=1",
                                      "recipe.precision=fp8-block", "recipe.activation_checkpointing=full",
                                      "layout.shard=128", "layout.expert=64", "layout.pipeline=16", "layout.zero=1",
                                      "model.n_layers=64",
                                      "layout.expert_send=nodes"),
    "gemma on tpu": _plan("gemma-2b", "tpu-v5e", 16, "recipe.seq_len=2048", "recipe.global_batch=64",
                          "recipe.micro_batch=1", "recipe.steps=1000", "recipe.precision=bf16-mixed",
                          "layout.shard=16"),
    "prefill": ["plan", "llama-3-8b", "--device", "h100-sxm", "--phase", "prefill", "--context", "8192"],
    "decode in int4": ["plan", "llama-3-8b", "--device", "h100-sxm", "--phase", "decode", "--batch", "16", "--context",
                       "8192", "--weights", "int4"],
    "decode of latent attention": ["plan", "deepseek-v2-lite", "--device", "h100-sxm", "--phase", "decode", "--batch",
                                   "8", "--context", "4096"],
    "time of 8b": ["explain", "time", *_plan("llama-3-8b", "h100-sxm", 64, *_8B, "layout.shard=64")[1:]],
    "napkin": ["napkin", "--params", "70B", "--tokens", "15T", "--device", "h100-sxm", "--count", "1024", "--mfu",
               "0.5"],
    "rules": ["rules", "llama-3-8b"],
    "optimal": ["optimal", "--device", "h100-sxm", "--count", "32", "--days", "14", "--family", "none"],
}  # fmt: skip


def _search(model: str, device: str, count: int, *more: str) -> list[str]:
    return ["layouts", *_plan(model, device, count, *more)[1:]]


_4K = ["recipe.seq_len=4096", "recipe.steps=100", "recipe.precision=bf16-sharded"]
SEARCHES: dict[str, list[str]] = {
    "gpt2 on 8 a100": _search("gpt2", "a100-sxm-80gb", 8, "recipe.global_batch=512", "recipe.steps=100"),
    "8b on 16 h100": _search("llama-3-8b", "h100-sxm", 16, *_4K, "recipe.global_batch=256"),
    "8b on 64 a100": _search("llama-3-8b", "a100-sxm-80gb", 64, *_4K, "recipe.global_batch=512"),
    "13b on 32 a100 of 40 GB": _search("llama-2-13b", "a100-sxm-40gb", 32, *_4K, "recipe.global_batch=128"),
    "70b on 64 h200": _search("llama-3-70b", "h200", 64, *_4K, "recipe.global_batch=256"),
    "70b on 512 h100": _search("llama-3-70b", "h100-sxm", 512, *_4K, "recipe.global_batch=1024"),
    "405b on 2048 h100": _search("llama-3.1-405b", "h100-sxm", 2048, *_4K, "recipe.global_batch=2048"),
    "mixtral on 64 h100": _search("mixtral-8x7b", "h100-sxm", 64, *_4K, "recipe.global_batch=512"),
    "gemma on 16 h100": _search("gemma-2-9b", "h100-sxm", 16, *_4K, "recipe.attention=flash",
                                "recipe.global_batch=256"),
    "deepseek-v2-lite on 32 h100": _search("deepseek-v2-lite", "h100-sxm", 32, *_4K, "recipe.global_batch=512"),
}  # fmt: skip


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


# Every key and value of these answers is frozen, with those of `PLANS`; `golden.leaves` says how.
ANSWERS: dict[str, list[str]] = {
    "breaks of 8b as sequences grow": ["breaks", *_plan("llama-3-8b", "h100-sxm", 64)[1:], "--along", "sequence"],
    "breaks of a laid out run": ["breaks", *PLANS["8b on 64 a100, hsdp, full"][1:], "--along", "devices"],
    "fit of 8b on one a100": ["fit", "llama-3-8b", "--device", "a100-sxm-40gb"],
    "fit of a run as it is": ["fit", *PLANS["gpt2 on one v100"][1:], "--as-is"],
    "fit of LoRA on a small card": ["fit", "llama-3-8b", "--device", "l4", "--set", "recipe.lora.rank=16"],
    "advise on 8b": [
        "advise", "llama-3-8b", "--device", "h100-sxm", "--count", "32", "--set", "recipe.tokens=1T", "--limit", "1h",
    ],
    "advise on a laid out run": ["advise", *PLANS["8b on 64 h100, tensor, pipeline"][1:], "--limit", "1h"],
    "plan of a searched layout": ["plan", "llama-3-70b", "--device", "h100-sxm", "--count", "64"],
    "plan on an unknown device": ["plan", "gpt2"],
    "plan that does not fit": ["plan", "llama-3-70b", "--device", "l4", "--count", "1"],
    "plan of LoRA": ["plan", "llama-3-8b", "--device", "rtx-4090", "--set", "recipe.lora.rank=16"],
    "compare two models": ["compare", "gpt2", "gpt2-xl", "--device", "h100-sxm"],
    "compare with a change": ["compare", *PLANS["8b on 64 h100"][1:], "--set-b", "recipe.loss=chunked"],
    "loop of gpt2": ["loop", "gpt2", "--set", "recipe.tokens=10B"],
    "explain memory": ["explain", "memory", *PLANS["8b on 64 h100, tensor, pipeline"][1:]],
    "explain memory with a free size": ["explain", "memory", "gpt2", "--symbolic", "T", "--memory", "80GB"],
    "explain flops": ["explain", "flops", "gpt2"],
    "explain parameters": ["explain", "parameters", "deepseek-v2-lite"],
    "rules of a mixture": ["rules", "mixtral-8x7b"],
    "layouts of 8b": _search("llama-3-8b", "h100-sxm", 16, *_4K, "recipe.global_batch=256"),
    "optimal for money": ["optimal", "--money", "1M", "--price", "2", "--device", "h100-sxm", "--count", "64"],
    "models": ["catalog", "models"],
    "devices": ["catalog", "devices"],
    "a number": ["dtype", "0.1"],
    "a tensor": ["tensor", "bfloat16[4,8,16]", "transpose:1,2", "view(512)"],
    "an einsum": ["einsum", "bhqd,bhkd->bhqk", "2,4,16,8", "2,4,32,8", "--device", "h100-sxm"],
    "a pattern of einops": ["einsum", "b (h d) t -> b h t d", "2,64,10", "h=8"],
    "napkin for days": [
        "napkin", "--params", "8B", "--tokens", "1T", "--days", "30", "--device", "h100-sxm", "--mfu", "0.4",
    ],
    "a trace of others": ["reconcile", "--trace", "tests/observe/profiler/traces/a100_ddp_2ranks.json.gz"],
    "a refused layout": ["plan", *_plan("llama-3-8b", "h100-sxm", 8, "layout.tensor=3", "layout.shard=3")[1:]],
    "a refused word": ["plan", "llama-3-8x"],
}  # fmt: skip

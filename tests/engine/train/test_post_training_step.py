"""A real GRPO step on this machine, sampler and trainer in turn: each phase holds the bytes that `rl` says."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from trainledger.answers.load import load
from trainledger.engine.nn.cache import Cache
from trainledger.engine.nn.transformer import Transformer, build
from trainledger.engine.train.optimizer import build_optimizer
from trainledger.engine.train.precision import build_model
from trainledger.forecast.plan.post_training import Phase, Rollout, post_training
from trainledger.observe.measure.meter import AllocatorPeak
from trainledger.spec.device import Device
from trainledger.spec.run import Run
from trainledger.trace.fakes.tensors import make_states

PROMPTS, GROUP, PROMPT, LONGEST, MICRO_BATCH = 2, 4, 8, 24, 4
SEQUENCES, LENGTH = PROMPTS * GROUP, PROMPT + LONGEST
MODEL: dict[str, Any] = {
    "d_model": 128, "n_layers": 3, "feed_forward": {"d_ff": 384}, "vocab_size": 512, "max_seq_len": 64,
    "tie_embeddings": False, "attention": {"n_heads": 4, "n_kv_heads": 2, "head_dim": 32},
}  # fmt: skip


def run_of(**recipe: Any) -> Run:
    sizes = {"seq_len": LENGTH, "global_batch": SEQUENCES, "micro_batch": MICRO_BATCH, "steps": 1}
    return load({"model": MODEL, "recipe": sizes | recipe})


def live_nbytes() -> int:
    """Bytes of all tensors that Python reaches, each storage once, without the tables of angles of copies in bf16."""
    gc.collect()
    things = (thing for thing in gc.get_objects() if issubclass(type(thing), Tensor))
    tensors = [
        tensor for tensor in things if tensor.layout == torch.strided
    ]  # others' tests leave some without storage
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    copies = [thing for thing in gc.get_objects() if type(thing) is Transformer]
    tables = [table.nbytes for model in copies for table in model.buffers() if table.dtype == torch.bfloat16]
    return sum(storages.values()) - sum(tables)


def copied(policy: Transformer, run: Run) -> Transformer:
    """The policy in bf16, as an engine or a reference holds it."""
    model = build(run.model, run.recipe).to(torch.bfloat16).requires_grad_(False).eval()
    model.load_state_dict({name: value.to(torch.bfloat16) for name, value in policy.state_dict().items()})
    return model


@torch.no_grad()
def sampled(engine: Transformer, cache: Cache, prompts: Tensor) -> Tensor:
    ids = prompts
    seen = prompts
    for _ in range(LONGEST):
        probabilities = engine(seen, cache=cache).float().softmax(-1)
        seen = torch.multinomial(probabilities, 1)
        ids = torch.cat([ids, seen], 1)
    return ids


def log_probabilities(model: Transformer, ids: Tensor) -> Tensor:
    losses = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1).float(), ids[:, 1:].flatten(), reduction="none")
    return -losses.view(len(ids), -1)[:, PROMPT - 1 :]


def peak_of(work: Callable[[], Any], live: int) -> int:
    with AllocatorPeak(torch.device("cpu"), live_nbytes=live) as peak:
        work()
    assert peak.nbytes is not None
    return peak.nbytes


@pytest.mark.parametrize("checkpointing", ["none", "full"])
@pytest.mark.long
def test_each_phase_of_a_step_holds_what_is_planned(checkpointing: str) -> None:
    run = run_of(activation_checkpointing=checkpointing, grad_clip=None)
    token = 2 * MODEL["n_layers"] * 2 * 32 * 2  # keys and values of a token in bf16
    torch.manual_seed(0)
    before = live_nbytes()

    def held() -> int:
        return live_nbytes() - before

    policy = build_model(run.model, run.recipe)
    optimizer = build_optimizer(policy, run.recipe)
    make_states(policy, optimizer)
    states = held()
    reference = copied(policy, run)
    share = held() - states + SEQUENCES * LENGTH * token  # of weights and cache
    machine = Device("this-machine", "this machine", {}, memory_nbytes=10 * share)
    rollout = Rollout(
        prompts=PROMPTS, group=GROUP, prompt=PROMPT, completion=LONGEST, longest=LONGEST, utilization=0.1, tensor=1,
        reference=True,
    )  # fmt: skip
    answer = post_training(run, rollout, machine, backend="cpu")
    phases: dict[str, Phase] = {phase.name: phase for phase in answer.phases}
    parts = {name: dict(phase.parts) for name, phase in phases.items()}
    assert parts["rollout"]["training states"] == states
    assert parts["rollout"]["reference"] == held() - states

    engine = copied(policy, run)
    cache = Cache(run.model, engine.embed_tokens.weight, SEQUENCES, LENGTH)
    assert answer.concurrent == SEQUENCES
    assert answer.cached_tokens == SEQUENCES * LENGTH
    assert parts["rollout"]["engine"] == pytest.approx(held() - states - parts["rollout"]["reference"], abs=1)
    ids = sampled(engine, cache, torch.randint(512, (PROMPTS, PROMPT)).repeat_interleave(GROUP, 0))
    old = torch.empty(SEQUENCES, LONGEST)
    known = torch.empty(SEQUENCES, LONGEST)
    kept = parts["rollout"]["answers and their log-probabilities"]
    assert kept == sum(tensor.nbytes for tensor in (ids, old, known))
    assert phases["rollout"].nbytes == held()

    del engine, cache
    assert phases["refit"].nbytes - parts["refit"]["engine's weights"] == held()
    for name, model, to in (("log-probabilities", policy, old), ("reference", reference, known)):

        def taken(model: Transformer = model, to: Tensor = to) -> None:
            with torch.no_grad():
                for at in range(0, SEQUENCES, MICRO_BATCH):
                    to[at : at + MICRO_BATCH] = log_probabilities(model, ids[at : at + MICRO_BATCH])

        measured = peak_of(taken, held())
        assert measured == pytest.approx(phases[name].nbytes, rel=0.02 if name == "log-probabilities" else 0.05)

    rewards = (ids[:, PROMPT:] < 64).float().mean(1).view(PROMPTS, GROUP)
    advantages = ((rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)).flatten()
    weights = [parameter.clone() for parameter in policy.parameters()]
    gone = sum(weight.nbytes for weight in weights)

    def updated() -> None:
        for at in range(0, SEQUENCES, MICRO_BATCH):
            rows = slice(at, at + MICRO_BATCH)
            ratio = (log_probabilities(policy, ids[rows]) - old[rows]).exp()
            bounded = torch.minimum(ratio * advantages[rows, None], ratio.clamp(0.8, 1.2) * advantages[rows, None])
            (-bounded.mean() / (SEQUENCES // MICRO_BATCH)).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    measured = peak_of(updated, held() - gone)
    assert measured == pytest.approx(phases["update"].nbytes, rel=0.02)
    moved = [not torch.equal(*pair) for pair in zip(weights, policy.parameters(), strict=True)]
    assert all(moved)

    del weights
    rebuilt = copied(policy, run)
    assert held() == pytest.approx(phases["refit"].nbytes, abs=advantages.nbytes + rewards.nbytes)
    assert rebuilt.embed_tokens.weight.dtype == torch.bfloat16

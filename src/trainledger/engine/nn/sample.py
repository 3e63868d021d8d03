"""Text from a model, one token at a time.

Shapes: T tokens so far, V vocab_size.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from trainledger.engine.nn.transformer import Transformer
from trainledger.spec.problem import InvalidInput, Problem


@torch.no_grad()
def generate(
    model: Transformer,
    ids: Sequence[int],
    n_tokens: int,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    n_known: int | None = None,
    seed: int = 0,
) -> list[int]:
    """The prompt ``ids`` and ``n_tokens`` more, each drawn from softmax(logits / temperature).

    ``temperature`` 0 takes the likeliest token; ``top_k`` leaves only that many to draw from, ``n_known`` only
    ids below it (a vocabulary may be padded beyond its tokenizer's). Past ``max_seq_len`` the model sees the
    last ``max_seq_len`` tokens. Draws are made on the CPU and depend on ``seed`` alone; the global generator is
    not touched. `InvalidInput` for an empty prompt and for ids outside the vocabulary.
    """
    _check(model, ids, n_tokens, temperature, top_k, seed)
    generator = torch.Generator().manual_seed(seed)
    device = model.embed_tokens.weight.device
    was_training = model.training
    model.eval()
    written = [int(each) for each in ids]
    try:
        for _ in range(n_tokens):
            seen_1T = torch.tensor([written[-model.spec.max_seq_len :]], device=device)
            logits_V = model(seen_1T)[0, -1, :n_known].float().cpu()
            written.append(_draw(logits_V, temperature, top_k, generator))
    finally:
        model.train(was_training)
    return written


def _draw(logits_V: Tensor, temperature: float, top_k: int | None, generator: torch.Generator) -> int:
    if temperature == 0:
        return int(logits_V.argmax())
    if top_k is not None and top_k < len(logits_V):
        least = logits_V.topk(top_k).values[-1]
        logits_V = logits_V.masked_fill(logits_V < least, float("-inf"))
    # Shifted by the largest before division: a tiny temperature must not make inf - inf of it.
    weights_V = ((logits_V - logits_V.max()).double() / temperature).softmax(dim=-1)
    return int(torch.multinomial(weights_V, 1, generator=generator))


def _check(
    model: Transformer, ids: Sequence[int], n_tokens: int, temperature: float, top_k: int | None, seed: int
) -> None:
    size = model.spec.vocab_size
    problems = []
    if not len(ids):
        problems.append(Problem("prompt", None, "must have at least one token"))
    outside = next((each for each in ids if not 0 <= each < size), None)
    if outside is not None:
        problems.append(Problem("prompt", outside, f"is a token outside the vocabulary of {size}"))
    if n_tokens < 0:
        problems.append(Problem("tokens", n_tokens, "must be at least 0", 0))
    if not 0 <= temperature < float("inf"):
        problems.append(Problem("temperature", temperature, "must be a finite number of at least 0", 1.0))
    if top_k is not None and top_k < 1:
        problems.append(Problem("top_k", top_k, "must be at least 1", 1))
    if not 0 <= seed < 2**63:
        problems.append(Problem("seed", seed, "must be from 0 to 2**63 - 1", 0))
    if problems:
        raise InvalidInput(problems)

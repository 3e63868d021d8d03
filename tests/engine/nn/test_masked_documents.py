"""Attention that stops at documents: each document of a packed sequence is read as if it stood alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from trainledger.engine.nn.init import initialize
from trainledger.engine.nn.transformer import Transformer
from trainledger.spec.model import ModelSpec
from trainledger.spec.parts import from_fields

END = 0
SIZES: dict[str, Any] = {
    "vocab_size": 50, "d_model": 32, "n_layers": 3, "attention.n_heads": 4, "feed_forward.d_ff": 48, "max_seq_len": 64,
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "rope": {}, "shared heads": {"attention.n_kv_heads": 2}, "alibi": {"positions": "alibi"},
    "window": {"attention.window": 5, "attention.global_every": 2}, "none": {"positions": "none"},
    "latent": {"attention": "latent", "attention.kv_rank": 12, "attention.nope_head_dim": 8,
               "attention.rope_head_dim": 4, "attention.v_head_dim": 8},
}  # fmt: skip


def model(fields: dict[str, Any], *, documents: bool = True, attention: str = "sdpa", **more: Any) -> Transformer:
    made = Transformer(from_fields(ModelSpec, {**SIZES, **fields}), attention=attention, documents=documents, **more)
    initialize(made, seed=3)
    with torch.no_grad():
        for name, each in made.named_parameters():
            if "proj" in name:
                each.mul_(8)  # so that what is attended to matters
    made.masks.end_id = END
    return made.eval()


def rows(*lengths: tuple[int, ...], total: int = 40) -> Tensor:
    """Sequences of documents of these lengths, their end tokens in front; the first begins in the midst of one."""
    drawn = torch.Generator().manual_seed(1)
    packed = []
    for each in lengths:
        ids = torch.randint(1, 50, (total,), generator=drawn)
        for length in torch.tensor(each).cumsum(0).tolist():
            ids[length] = END
        packed.append(ids)
    return torch.stack(packed)


PACKED = rows((7, 1, 12), (20,), ())


def documents_of(ids_T: Tensor) -> list[slice]:
    begins = sorted({0, *(ids_T == END).nonzero()[:, 0].tolist()})
    return [slice(begin, end) for begin, end in zip(begins, [*begins[1:], len(ids_T)], strict=True)]


@pytest.mark.parametrize("attention", ["sdpa", "math"])
@pytest.mark.parametrize("fields", MODELS.values(), ids=MODELS)
def test_logits_of_each_document_are_those_of_it_alone(fields: dict[str, Any], attention: str) -> None:
    masked, joined = model(fields, attention=attention), model(fields, documents=False, attention=attention)
    with torch.no_grad():
        packed = masked(PACKED)
        for ids_T, logits_TV in zip(PACKED, packed, strict=True):
            for each in documents_of(ids_T):
                alone = joined(ids_T[None, each])[0]
                torch.testing.assert_close(logits_TV[each], alone, rtol=1e-4, atol=2e-5)
        # Which is not so where attention goes on: the second document of the first sequence hears of the first one.
        through = joined(PACKED)
        second = documents_of(PACKED[0])[2]
        assert (through[0, second] - packed[0, second]).abs().max() > 1e-2
        torch.testing.assert_close(through[2], packed[2], rtol=1e-4, atol=2e-5)  # of one document


@pytest.mark.parametrize("attention", ["sdpa", "math"])
def test_learned_positions_count_on_and_documents_hear_nothing_of_each_other(attention: str) -> None:
    masked = model({"positions": "learned"}, attention=attention)
    other = PACKED.clone()
    second = documents_of(PACKED[0])[2]
    other[0, : second.start] = 1 + PACKED[0, : second.start] % 49  # another text, with ends no longer there
    with torch.no_grad():
        torch.testing.assert_close(masked(other)[0, second], masked(PACKED)[0, second])
        alone = masked(PACKED[:1, second])[0]
        assert (alone - masked(PACKED)[0, second]).abs().max() > 1e-3  # at other positions


@pytest.mark.parametrize("attention", ["sdpa", "math"])
def test_gradients_are_those_of_the_documents_alone(attention: str) -> None:
    masked, joined = model({}, attention=attention), model({}, documents=False, attention=attention)
    weight = torch.randn(40, 50, generator=torch.Generator().manual_seed(2))
    (masked(PACKED[:1])[0] * weight).sum().backward()
    for each in documents_of(PACKED[0]):
        (joined(PACKED[:1, each])[0] * weight[each]).sum().backward()
    for (name, mine), other in zip(masked.named_parameters(), joined.parameters(), strict=True):
        # fp32 angles of other positions round by 1e-5 of the largest gradient, with AVX-512 unlike with AVX2.
        loose = 3e-5 * float(other.grad.abs().max())
        torch.testing.assert_close(mine.grad, other.grad, rtol=1e-3, atol=loose, msg=name)


def test_until_the_token_that_ends_them_is_set_a_sequence_is_one_document() -> None:
    masked, joined = model({}), model({}, documents=False)
    masked.masks.end_id = Transformer(masked.spec, documents=True).masks.end_id
    with torch.no_grad():
        torch.testing.assert_close(masked(PACKED), joined(PACKED), rtol=1e-4, atol=2e-5)

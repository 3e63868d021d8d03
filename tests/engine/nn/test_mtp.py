"""Multi-token prediction: which tokens it looks at, how its loss joins, and that it is gone after training."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from models import sizes
from trainledger.engine.nn.transformer import Transformer, build
from trainledger.spec.model import ModelSpec
from trainledger.spec.parts import from_fields, with_fields
from trainledger.spec.recipe import Recipe

torch.set_num_threads(1)

SPEC = from_fields(
    ModelSpec,
    {
        **sizes(V=13, D=8, L=2, H=2, F=16, T=12),
        "feed_forward": "experts",
        "feed_forward.n_experts": 4,
        "feed_forward.expert_d_ff": 5,
        "feed_forward.n_dense_layers": 1,
        "n_mtp_layers": 2,
    },
)
RECIPE = Recipe(seq_len=9, global_batch=2, steps=1, mtp_loss=0.3)


def made(spec: ModelSpec = SPEC, **recipe: object) -> Transformer:
    torch.manual_seed(0)
    return build(spec, with_fields(RECIPE, recipe))


def written_out(model: Transformer, ids_BT: Tensor) -> Tensor:
    """The mean loss of the modules, position by position of the whole sequence, masked where there is no target."""
    e_BTD = model.embed_tokens(ids_BT)
    shared = model.shared(range(2), e_BTD, 9)
    h_BTD = e_BTD
    for layer, each in zip(model.layers, shared, strict=True):
        h_BTD = layer(h_BTD, each)
    total = torch.zeros(())
    assert model.mtp is not None
    for ahead, module in enumerate(model.mtp, start=1):
        next_BTD = torch.roll(e_BTD, -ahead, dims=1)  # what comes round at the end is never a target
        x_BTD = module.eh_proj(torch.cat((module.enorm(next_BTD), module.hnorm(h_BTD)), dim=-1))
        h_BTD = module.block(x_BTD, shared[-1])
        logits_BTV = model.lm_head(module.norm(h_BTD))
        length = ids_BT.shape[1] - 1 - ahead
        total = total + F.cross_entropy(logits_BTV[:, :length].flatten(0, 1), ids_BT[:, ahead + 1 :].flatten())
    return total / 2


def test_the_loss_of_the_modules_joins_with_its_weight() -> None:
    model, plain = made(), made()
    ids_BT = torch.randint(0, 13, (2, 9))
    F.cross_entropy(model(ids_BT).flatten(0, 1), ids_BT.flatten()).backward()
    plain.eval()
    loss = F.cross_entropy(plain(ids_BT).flatten(0, 1), ids_BT.flatten())
    plain.train()
    (loss + 0.3 * written_out(plain, ids_BT)).backward()
    for (name, mine), other in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert mine.grad is not None, name
        torch.testing.assert_close(mine.grad, other.grad, rtol=1e-4, atol=1e-6)


def test_checkpointed_modules_have_the_same_gradients() -> None:
    ids_BT = torch.randint(0, 13, (2, 9))
    found = []
    for how in ("none", "full"):
        model = made(activation_checkpointing=how)
        model(ids_BT).square().mean().backward()
        found.append([each.grad for each in model.parameters()])
    torch.testing.assert_close(*found)


def test_without_training_the_modules_do_not_run() -> None:
    model = made()
    plain = made(with_fields(SPEC, {"n_mtp_layers": 0}))
    plain.load_state_dict({name: each for name, each in model.state_dict().items() if not name.startswith("mtp.")})
    ids_BT = torch.randint(0, 13, (2, 9))
    ran: list[str] = []
    assert model.mtp is not None
    model.mtp.register_forward_pre_hook(lambda *_: ran.append("list"))
    for each in model.mtp:
        each.register_forward_pre_hook(lambda *_: ran.append("module"))
    model.eval()
    torch.testing.assert_close(model(ids_BT), plain(ids_BT))
    model.train()
    with torch.no_grad():
        model(ids_BT)
    assert ran == []
    model(ids_BT)
    assert ran == ["module"] * 2


def test_the_modules_are_where_the_ledger_has_them() -> None:
    from trainledger.ledger.model.parameters import leaves_of, parameters

    model = made()
    leaves = leaves_of(SPEC)
    mine = [(name, tuple(each.shape)) for name, each in model.named_parameters() if name.startswith("mtp.")]
    assert mine == [(name, leaf.shape) for name, leaf in leaves.after.items() if name.startswith("mtp.")]
    assert sum(each.numel() for each in model.parameters()) == parameters(SPEC).total == leaves.elements()
    assert parameters(SPEC).active == parameters(with_fields(SPEC, {"n_mtp_layers": 0})).active

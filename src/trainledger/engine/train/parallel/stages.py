"""What of a model a rank of a pipeline holds and runs: its chunks of layers, with what stands before or after all.

Parameters keep the names that they have in the whole model, so their first values and their checkpoints do not depend
on the layout.
"""

from __future__ import annotations

from itertools import accumulate

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from trainledger.engine.nn.checkpointing import run_layers
from trainledger.engine.nn.loss import next_token_loss, run_loss, weighing
from trainledger.engine.nn.transformer import Transformer
from trainledger.engine.train.precision import autocast
from trainledger.spec.layout import Layout
from trainledger.spec.run import Run

BEFORE = ("embed_tokens", "embed_positions", "embed_norm")  # on the first stage
AFTER = ("norm", "lm_head")  # on the last


def stages_of(model: Transformer, run: Run, rank: int) -> list[Stage]:
    """The stages of one rank of a pipeline, which share their modules with ``model``; it keeps no others.

    Of V stages on each rank, the rank has every P-th of the pipeline's (Narayanan et al. 2021).
    """
    layers = layers_of_stages(run.layout, run.model.n_layers)
    stages = [Stage(model, run, each, layers[each]) for each in range(rank, len(layers), run.layout.pipeline)]
    held = {id(module) for stage in stages for module in stage.modules()}
    for index, block in enumerate(list(model.layers)):
        if id(block) not in held:
            del model.layers._modules[str(index)]  # `del model.layers[index]` would give the others new names
    for name in (*BEFORE, *AFTER):
        if id(getattr(model, name)) not in held:
            setattr(model, name, None)
    return stages


def layers_of_stages(layout: Layout, n_layers: int) -> list[range]:
    """The layers of each stage of the whole pipeline.

    >>> layers_of_stages(Layout(pipeline=2, stage_layers=(1, 2)), 3)
    [range(0, 1), range(1, 3)]
    """
    count = layout.pipeline * layout.virtual_stages
    sizes = layout.stage_layers or (n_layers // count,) * count
    return [range(end - size, end) for size, end in zip(sizes, accumulate(sizes), strict=True)]


class Stage(Transformer):
    """Some layers in a row of a model, with its embedding or its head where they are the first or the last.

    ``index`` is its place among all stages of the pipeline. It is called with token ids on the first stage, else with
    what the stage before gives; the last takes targets too, and gives the loss.
    """

    def __init__(self, model: Transformer, run: Run, index: int, layers: range) -> None:
        nn.Module.__init__(self)
        layout = run.layout
        self.spec, self.checkpointing, self.unused_rows = model.spec, model.checkpointing, model.unused_rows
        self.recipe, self.n_batches = run.recipe, run.grad_accum
        self.index, self.first_layer = index, layers.start
        self.begins, self.ends = index == 0, index == layout.pipeline * layout.virtual_stages - 1
        self.token_ranks = layout.tensor if layout.sequence_parallel else 1
        self.rotary, self.rotary_local, self.masks = model.rotary, model.rotary_local, model.masks
        self.dropout, self.loss, self.mtp = model.dropout, model.loss, None
        for name in BEFORE:
            setattr(self, name, getattr(model, name) if self.begins else None)
        self.layers = nn.ModuleList(model.layers[each] for each in layers)
        for name in AFTER:
            setattr(self, name, getattr(model, name) if self.ends else None)

    def forward(self, x: Tensor, targets_BT: Tensor | None = None) -> Tensor:  # type: ignore[override]
        """What the next stage reads, [B, T, D]; on the last stage, with targets, the micro-batch's part of the loss.

        Without gradients, as in an evaluation, its whole mean loss.
        """
        with autocast(self.recipe.precision, x.device), weighing(None, self.n_batches):
            if not self.ends:
                x_BTD = self._hidden(x).contiguous()
                return x_BTD.clone() if x_BTD._is_view() else x_BTD  # torch detaches it in place
            assert targets_BT is not None, "the last stage takes the loss"
            if not torch.is_grad_enabled():
                return _whole(next_token_loss(self._last(x), targets_BT))
            loss = run_loss(self._last, x, targets_BT, self.recipe)
            if self.n_batches > 1:
                loss = loss / self.n_batches
        return _whole(loss)

    def _last(self, x: Tensor, targets_BT: Tensor | None = None) -> Tensor:
        """What the whole model gives, of what the stage before it has made: logits, or with targets the loss."""
        x_BTD = self._hidden(x)
        if self.norm is not None:
            x_BTD = self.norm(x_BTD)
        if targets_BT is not None:
            assert self.loss is not None, "this model's loss is taken of its logits"
            return self.loss.whole(x_BTD, targets_BT, self.lm_head)
        logits_BTV: Tensor = self.lm_head(x_BTD)
        return logits_BTV

    def _hidden(self, x: Tensor) -> Tensor:
        """The output of the stage's layers."""
        n_tokens = x.shape[1] if self.begins else x.shape[1] * self.token_ranks
        first = [self.embed(x) if self.begins else x]  # no name here keeps it alive while the layers run
        del x
        layers = range(self.first_layer, self.first_layer + len(self.layers))
        shared = self.shared(layers, first[0], n_tokens)
        return run_layers(
            list(self.layers), shared, first.pop(), self.spec, self.checkpointing, before=self.first_layer
        )


def _whole(loss: Tensor) -> Tensor:
    """A loss that all tensor ranks have, as a plain tensor, and no view, as torch detaches it in place."""
    return loss.to_local().clone() if isinstance(loss, DTensor) else loss

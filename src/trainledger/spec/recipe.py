"""The recipe: how the model is trained."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from trainledger.spec.frozen import frozen
from trainledger.spec.objective import OBJECTIVES, NextToken, Objective
from trainledger.spec.optimizers import OPTIMIZERS, AdamW, Optimizer
from trainledger.spec.parts import part
from trainledger.spec.precision import FP32, PRECISIONS, Precision
from trainledger.spec.savings import CHECKPOINTING, LOSSES, Checkpointing, FullLoss, KeepAll, Lora, Loss
from trainledger.spec.schedule import SCHEDULES, Cosine, Schedule, WarmupStableDecay, rate
from trainledger.spec.setting import setting


@frozen(kw_only=True)
class Stop:
    """The run ends with exit code 3 and a diagnosis."""

    kind: ClassVar[str] = "stop"


@frozen(kw_only=True)
class RollBack:
    """The newest good checkpoint from before the first of these steps, and from there other data than before.

    All batches from that checkpoint to the last bad step are left out (Chowdhery et al. 2022, PaLM, section 5.1).
    """

    kind: ClassVar[str] = "roll-back"

    times: int = setting("roll-backs of a run; the next one ends it with exit code 3", 3, at_least=1)


@frozen(kw_only=True)
class Guard:
    """Steps with a loss or gradient that is not finite: their update is left out, but not endlessly."""

    skips: int = setting(
        "steps of a window that may be skipped because loss or gradient is not finite; 0 = none", 3, at_least=0
    )
    window: int = setting("steps of a window", 100, at_least=1)
    beyond: Stop | RollBack = part(
        "the action on one more: stop = end with exit code 3, roll-back = continue from the newest good checkpoint "
        "with other data",
        Stop,
        RollBack,
        default=Stop(),
    )


@frozen(kw_only=True)
class Watch:
    """Reports of steps with a loss or gradient norm far above recent ones, with the documents of their batch.

    Their update is made all the same: this says nothing of what a run computes.
    """

    deviations: float | None = setting(
        "a value is reported if it exceeds the window's median by more than this many median absolute deviations; none "
        "= never",
        10.0,
        above=0,
    )
    window: int = setting("steps of a window", 100, at_least=5, at_most=10_000)


FRAMEWORKS = ("torch", "megatron-core", "megatron-local", "deepspeed", "jax")
OFFLOADS = ("optimizer", "parameters")
ATTENTIONS = ("sdpa", "math", "flash", "efficient", "cudnn")


@frozen(kw_only=True)
class Dropless:
    """Experts process every token that is routed to them."""

    kind: ClassVar[str] = "dropless"
    factor: ClassVar[None] = None


@frozen(kw_only=True)
class Capacity:
    """Each expert has a fixed number of places (Fedus et al. 2021, Switch Transformers, arXiv 2101.03961)."""

    kind: ClassVar[str] = "capacity"

    factor: float = setting("places of an expert over its even share of the tokens", 1.25, above=0, at_most=10**5)


@frozen(kw_only=True)
class Evaluation:
    """When the loss of held-out text is measured."""

    every: int | None = setting("steps between evaluations; absent = only at the end", None, at_least=1)
    sequences: int = setting("held-out sequences in one evaluation", 64, at_least=1)


@frozen(kw_only=True)
class Checkpoints:
    """When the state of the run is written to disk."""

    every: int | None = setting("steps between checkpoints; absent = only at the end", None, at_least=1)
    asynchronous: bool = setting(
        "training continues while a checkpoint is written; it waits only for the copy to host memory", False
    )
    keep_last: int = setting("newest checkpoints kept", 2, at_least=1)
    keep_every: int | None = setting("checkpoints at multiples of this step are kept for good", None, at_least=1)


@frozen(kw_only=True)
class WeightAverage:
    """A moving average of the weights, in addition to them (Polyak and Juditsky 1992; Tarvainen and Valpola 2017)."""

    decay: float = setting(
        "decay of the average at each step; 0.999 averages over about a thousand steps",
        0.999,
        above=0,
        at_most=0.9999999,
    )


@frozen(kw_only=True)
class MaximalUpdate:
    """muP: rates and the head's start follow the width, so that a learning rate found on a narrow model holds for a
    wide one (Yang et al. 2022, Tensor Programs V, arXiv 2203.03466, table 3, for Adam)."""

    base_width: int = setting("model.d_model of the model for which learning_rate was found", at_least=1)


@frozen(kw_only=True)
class Recipe:
    """Batch, precision, optimizer and schedule of a run, and its intervals of evaluation and checkpoints.

    >>> recipe = Recipe(seq_len=1024, global_batch=8, steps=100, optimizer=AdamW(beta2=0.98))
    >>> recipe.precision.kind, recipe.tokens_per_step
    ('fp32', 8192)
    """

    seq_len: int = setting("tokens in a sequence", quantity="length", at_least=1, at_most=10**9)
    global_batch: int = setting("sequences in one optimizer step, over all devices", at_least=1, at_most=10**9)
    micro_batch: int | None = setting(
        "sequences in one forward of a device; absent = all of a device's", None, at_least=1, at_most=10**9
    )
    tokens: int | None = setting("tokens to train on (or give steps)", None, at_least=1)
    steps: int | None = setting("optimizer steps (or give tokens)", None, at_least=1, at_most=10**12)

    precision: Precision = part(
        "number formats: one throughout (fp32, tf32, bf16, fp16), autocast over fp32 parameters (-mixed), fp32 shards "
        "gathered in bf16 (-sharded); fp8 linear layers with a scale per tensor, row or block, the rest as bf16-mixed "
        "or as bf16-sharded",
        *PRECISIONS.values(),
        default=FP32(),
    )
    framework: str = setting(
        "the program whose rules of memory are accounted for: torch = PyTorch's own modules and optimizers, eager; "
        "megatron-core = Megatron-LM's layers on Transformer Engine, its loss, and its buffers of gradients; "
        "megatron-local = the same without Transformer Engine; deepspeed = PyTorch's modules, and what DeepSpeed's "
        "pipeline engine and ZeRO-1 optimizers of 2022 hold; jax = a step that XLA compiles whole, as "
        "MaxText's (the default on TPUs)",
        "torch",
        choices=FRAMEWORKS,
    )
    attention: str = setting(
        "sdpa = the fused kernel that PyTorch selects (on compute capability 9 and 10 cuDNN's where possible, else "
        "flash; before 8.0 efficient), math = unfused; accelerators: flash, efficient, cudnn",
        "sdpa",
        choices=ATTENTIONS,
    )
    documents: str | None = setting(
        "masked = a token attends only to its document, from the end token before it on (Llama 3, arXiv 2407.21783, "
        "section 3.2; positions continue through the sequence); absent = to all before it in the sequence",
        None,
        choices=("masked",),
    )
    activation_checkpointing: Checkpointing = part(
        "what backward recomputes instead of keeping it: none; full = every block; segments = several blocks together; "
        "from-start = each block's input from the embedding on; selective = all but the operations in keep; attention "
        "= scores, softmax and mixture only; offload = nothing, but saved activations go to host memory",
        *CHECKPOINTING.values(),
        default=KeepAll(),
    )
    loss: Loss = part(
        "full = all logits at once, chunked = a part of the tokens at a time (logits recomputed in backward), fused = "
        "the same, with gradients computed in forward, compiled = torch.compile the loss of all logits, in-place = the "
        "gradient takes the place of the logits (Transformer Engine; framework megatron-core)",
        *LOSSES.values(),
        default=FullLoss(),
    )
    objective: Objective = part(
        "next-token = the loss of each token; dpo = of pairs of a chosen and a rejected answer, each a sequence of the "
        "batch, against a frozen reference; orpo = of pairs without a reference; kto = of single answers, desirable or "
        "not, against a reference and mismatched answers; reward = of pairs, by a score in place of logits; "
        "distillation = the logits of a frozen teacher, another model ([teacher])",
        *OBJECTIVES.values(),
        default=NextToken(),
    )
    expert_dispatch: Dropless | Capacity = part(
        "dropless = experts process every token routed to them, capacity = each has a fixed number of places",
        Dropless,
        Capacity,
        default=Dropless(),
    )
    load_balance_loss: float = setting(
        "weight of the loss that spreads tokens over experts (Switch); 0 = none", 0.0, at_least=0
    )
    mtp_loss: float = setting("weight of the mean loss of the multi-token prediction modules", 0.3, above=0)
    dropout: float = setting("probability on embeddings and residual branches", 0.0, at_least=0, at_most=0.99)
    attention_dropout: float = setting(
        "probability on attention weights; no fused CPU kernel has it: there attention is unfused",
        0.0,
        at_least=0,
        at_most=0.99,
    )
    deterministic: bool = setting(
        "accelerators: kernels that give the same bits each time, with CUBLAS_WORKSPACE_CONFIG=:4096:8", False
    )
    compile: bool = setting("torch.compile each block", False)
    launch_blocking: bool = setting(
        "CUDA_LAUNCH_BLOCKING=1: each kernel is launched after the one before has ended, so none overlap", False
    )
    cuda_graphs: bool = setting(
        "kernels are replayed as CUDA graphs, so that no step waits for the program to launch them; the graphs' own "
        "memory is not counted",
        False,
    )
    offload: str | None = setting(
        "model states in host memory: optimizer = its state and an fp32 copy of the weights, updated by the host's "
        "processor, gradients sent down and weights up (offload_optimizer of DeepSpeed); parameters = also the "
        "sharded parameters and gradients, sent up before each gather (CPUOffloadPolicy of FSDP2, offload_param of "
        "DeepSpeed); absent = none",
        None,
        choices=OFFLOADS,
    )
    gradient_fusion: bool = setting(
        "matmuls of linear layers add up weight gradients in the fp32 buffers (Megatron-LM's "
        "--gradient-accumulation-fusion, its default); Transformer Engine then keeps a stand-in of each weight shape",
        False,
    )
    grouped_experts: bool = setting("experts multiply on several streams, as in Transformer Engine", False)
    lora: Lora | None = part("adapters on frozen weights; absent = all weights are trained", Lora, default=None)

    optimizer: Optimizer = part("optimizer", *OPTIMIZERS.values(), default=AdamW())
    ema: WeightAverage | None = part(
        "an exponential moving average of the weights, which evaluate, sample and export can take; absent = none",
        WeightAverage,
        default=None,
    )
    mup: MaximalUpdate | None = part(
        "maximal update parametrization: the learning rate of matrices and the head's initial weights scale with the "
        "width; absent = neither does",
        MaximalUpdate,
        default=None,
    )
    learning_rate: float = setting("peak learning rate", 3e-4, above=0)
    schedule: Schedule = part("shape of the learning rate after warm-up", *SCHEDULES.values(), default=Cosine())
    grad_clip: float | None = setting(
        "global L2 norm of the gradients is clipped to this; none = no clipping", 1.0, above=0
    )

    initial_weights: str | None = setting(
        "directory of the initial weights: an import, a checkpoint or a run; absent = initialized by the seed", None
    )
    evaluation: Evaluation = part("when the loss of held-out text is measured", Evaluation, default=Evaluation())
    checkpoints: Checkpoints = part("when the run is saved", Checkpoints, default=Checkpoints())
    guard: Guard = part("the action on a loss or gradient that is not finite", Guard, default=Guard())
    watch: Watch = part("which spikes of loss and gradient norm are reported", Watch, default=Watch())
    seed: int = setting("seed of initialization, data order and dropout (each derived separately)", 0, at_least=0)

    @property
    def tokens_per_step(self) -> int:
        return self.global_batch * self.seq_len

    @property
    def total_steps(self) -> int:
        """Optimizer steps of the whole run: ``steps``, or the whole steps in ``tokens`` (at least one)."""
        if self.steps is not None:
            return self.steps
        assert self.tokens is not None
        return max(1, self.tokens // self.tokens_per_step)

    @property
    def tokens_beyond_steps(self) -> int:
        """What whole steps leave of ``tokens``, negative where one step is more; 0 below a thousandth of them."""
        rest = (self.tokens or 0) - self.total_steps * self.tokens_per_step
        return rest if self.tokens and abs(rest) * 1000 > self.tokens else 0

    @property
    def adapter_dropout(self) -> float:
        """The probability on the input of an adapter; 0 without adapters."""
        return 0.0 if self.lora is None else self.lora.dropout

    @property
    def of_megatron(self) -> bool:
        """The program is Megatron-LM, on Transformer Engine or without."""
        return self.framework in ("megatron-core", "megatron-local")

    @property
    def of_xla(self) -> bool:
        """The program is JAX: XLA compiles the whole step."""
        return self.framework == "jax"

    @property
    def compiles(self) -> bool:
        """Anything goes through torch.compile: the blocks or the loss."""
        return self.compile or self.loss.kind == "compiled"

    @property
    def uncompiled(self) -> Recipe:
        """The same without torch.compile, as it runs operation by operation."""
        loss = FullLoss(upcast=self.loss.upcast) if self.loss.kind == "compiled" else self.loss
        return replace(self, compile=False, loss=loss)


def learning_rate(recipe: Recipe, step: int) -> float:
    """The learning rate of the step with index ``step`` (the first is 0).

    >>> recipe = Recipe(seq_len=8, global_batch=1, steps=11, learning_rate=1.0)
    >>> [round(learning_rate(recipe, k), 3) for k in (0, 5, 10)]
    [1.0, 0.55, 0.1]
    """
    return rate(recipe.schedule, recipe.learning_rate, recipe.total_steps, step)


def sampled_steps(recipe: Recipe, most: int) -> list[int]:
    """About ``most`` indices of steps, evenly spaced, with the first, the last and those where the schedule turns.

    >>> sampled_steps(Recipe(seq_len=8, global_batch=1, steps=1000), 5)
    [0, 249, 499, 749, 999]
    """
    last, schedule = recipe.total_steps - 1, recipe.schedule
    turns = [schedule.warmup_steps - 1, schedule.warmup_steps]
    if isinstance(schedule, WarmupStableDecay):
        turns.append(last - round(schedule.decay_fraction * recipe.total_steps))
    spaced = [last * at // max(1, most - 1) for at in range(most)]
    return sorted({step for step in (*spaced, *turns) if 0 <= step <= last})


def due(step: int, every: int | None) -> bool:
    """Something that happens every so many steps happens after this one."""
    return every is not None and step % every == 0

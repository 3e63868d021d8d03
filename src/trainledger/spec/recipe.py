"""The recipe: how the model is trained."""

from __future__ import annotations

from dataclasses import replace

from trainledger.frozen import frozen
from trainledger.spec.lora import BASE_FORMATS
from trainledger.spec.optimizers import IMPLEMENTATIONS, OPTIMIZER_LOOPS, OPTIMIZERS
from trainledger.spec.precision import PRECISIONS
from trainledger.spec.savings import CHECKPOINTING, LOSSES
from trainledger.spec.setting import setting

SCHEDULES = ("cosine", "linear", "wsd", "constant")
ATTENTIONS = ("sdpa", "math", "flash", "efficient", "cudnn")
DISPATCHES = ("dropless", "capacity")
CAPACITY_FACTOR = 1.25  # Fedus et al. 2021, Switch Transformers, table 1


@frozen(kw_only=True)
class Recipe:
    """Batch, precision, optimizer, schedule, and how often things happen."""

    seq_len: int = setting("tokens in a sequence", at_least=1, at_most=10**9)
    global_batch: int = setting("sequences in one optimizer step, over all devices", at_least=1, at_most=10**9)
    micro_batch: int | None = setting(
        "sequences in one forward of a device; absent = all of a device's", default=None, at_least=1, at_most=10**9
    )
    tokens: int | None = setting("tokens to train on (or give steps)", default=None, at_least=1)
    steps: int | None = setting("optimizer steps (or give tokens)", default=None, at_least=1, at_most=10**12)

    precision: str = setting(
        "number formats: one throughout (fp32, tf32, bf16, fp16), autocast over fp32 parameters (-mixed), fp32 shards "
        "gathered in bf16 (-sharded); fp8 linear layers with a scale per tensor, row or block, the rest as bf16-mixed "
        "or as bf16-sharded",
        quantity="text", default="fp32", choices=PRECISIONS,
    )  # fmt: skip
    master_weights: bool = setting(
        "parameters in 16 bits, an fp32 copy of them with the optimizer", quantity="flag", default=False
    )
    gradient_dtype: str | None = setting(
        "fp32 = gradients of 16-bit parameters are added up in fp32 buffers; absent = in the parameters' format",
        quantity="text", default=None, choices=("fp32",),
    )  # fmt: skip
    moment_dtype: str | None = setting(
        "format of the optimizer's moments; absent = that of the weights it updates",
        quantity="text", default=None, choices=("fp32", "bf16"),
    )  # fmt: skip
    fp8_weight_caching: bool = setting(
        "fp8: weights are cast once a step and kept in 8 bits, as they are and transposed, for all its micro-batches "
        "(Transformer Engine's is_first_microbatch), instead of before each product",
        quantity="flag", default=False,
    )  # fmt: skip
    attention: str = setting(
        "sdpa = the fused kernel that PyTorch takes (on compute capability 9 and 10 cuDNN's where it can, else flash), "
        "math = scores written out; accelerators: flash, efficient, cudnn",
        quantity="text", default="sdpa", choices=ATTENTIONS,
    )  # fmt: skip
    activation_checkpointing: str = setting(
        "what is made again in backward instead of kept: none; full = every block; segments = several blocks together; "
        "from-start = each block's input from the embedding on; selective = all but the operations in recompute_keep; "
        "attention = scores, softmax and mixture only; offload = nothing, but what is kept goes to host memory",
        quantity="text", default="none", choices=CHECKPOINTING,
    )  # fmt: skip
    recompute_every: int = setting(
        "full, selective: every n-th block is recomputed, the others keep all", default=1, at_least=1, at_most=1000
    )
    recompute_segment: int | None = setting(
        "segments: blocks in one; absent = about the root of n_layers", default=None, at_least=1, at_most=10**5
    )
    recompute_keep: tuple[str, ...] = setting(
        "selective: operations whose outputs are kept, by PyTorch's name; matmuls = attention and every second matrix "
        "product; attention = the fused kernel",
        quantity="texts", default=("matmuls",),
    )  # fmt: skip
    loss: str = setting(
        "full = all logits at once, chunked = a part of the tokens at a time (logits made again in backward), "
        "fused = so too, but with the gradients taken in forward, compiled = torch.compile the loss of all logits",
        quantity="text", default="full", choices=LOSSES,
    )  # fmt: skip
    loss_chunks: int = setting("chunks of tokens in a chunked or fused loss", default=8, at_least=1, at_most=10**6)
    loss_upcast: bool = setting(
        "the loss is taken of logits in fp32, whatever their format", quantity="flag", default=True
    )
    expert_dispatch: str = setting(
        "dropless = experts take every token they are sent, capacity = each has a fixed number of places",
        quantity="text", default="dropless", choices=DISPATCHES,
    )  # fmt: skip
    capacity_factor: float | None = setting(
        "places of an expert over its even share of the tokens; absent = 1.25 (Switch)",
        quantity="number", default=None, above=0, at_most=10**5,
    )  # fmt: skip
    load_balance_loss: float = setting(
        "weight of the loss that spreads tokens over experts (Switch); 0 = none",
        quantity="number", default=0.0, at_least=0,
    )  # fmt: skip
    predict_ahead_loss: float = setting(
        "weight of the mean loss of the multi-token prediction modules", quantity="number", default=0.3, above=0
    )  # fmt: skip
    dropout: float = setting(
        "probability on embeddings and residual branches", quantity="number", default=0.0, at_least=0, at_most=0.99
    )
    attention_dropout: float = setting(
        "probability on attention weights; no fused kernel of a CPU has it: there they are written out",
        quantity="number", default=0.0, at_least=0, at_most=0.99,
    )  # fmt: skip
    compile: bool = setting("torch.compile each block", quantity="flag", default=False)
    launch_blocking: bool = setting(
        "CUDA_LAUNCH_BLOCKING=1: each kernel is launched when the one before is done, and nothing runs beside another",
        quantity="flag", default=False,
    )  # fmt: skip

    lora_rank: int | None = setting(
        "rank of the adapters that are trained beside frozen weights; absent = all weights are trained",
        default=None, at_least=1, at_most=10**6,
    )  # fmt: skip
    lora_alpha: float = setting(
        "what adapters add is multiplied by this over lora_rank", quantity="number", default=16.0
    )
    lora_targets: tuple[str, ...] = setting(
        "linear layers with adapters: linear (all in the blocks), attention, mlp, or names such as q_proj",
        quantity="texts", default=("linear",),
    )  # fmt: skip
    lora_dropout: float = setting(
        "probability on the input of an adapter", quantity="number", default=0.0, at_least=0, at_most=0.99
    )
    base_format: str | None = setting(
        "format of the frozen linear layers: bf16, int8 or nf4 in blocks with scales; absent = as other parameters",
        quantity="text", default=None, choices=BASE_FORMATS,
    )  # fmt: skip

    optimizer: str = setting("optimizer", quantity="text", default="adamw", choices=OPTIMIZERS)
    optimizer_loop: str | None = setting(
        "fused, foreach or loop; absent = fused where torch has it, else foreach (Adafactor and 8-bit Adam: loop)",
        quantity="text",
        default=None,
        choices=OPTIMIZER_LOOPS,
    )
    amsgrad: bool = setting("Adam, AdamW: divide by the largest second moment so far", quantity="flag", default=False)
    rmsprop_momentum: float = setting(
        "RMSProp: momentum of its updates; 0 = none", quantity="number", default=0.0, at_least=0, at_most=0.9999999
    )
    rmsprop_centred: bool = setting(
        "RMSProp: divide by the standard deviation instead of the root mean square", quantity="flag", default=False
    )
    muon_momentum: float = setting(
        "Muon: momentum of its matrices", quantity="number", default=0.95, at_least=0, at_most=0.9999999
    )
    learning_rate: float = setting("peak learning rate", quantity="number", default=3e-4, above=0)
    beta1: float = setting(
        "decay of the first moment (or momentum)", quantity="number", default=0.9, at_least=0, at_most=0.9999999
    )
    beta2: float = setting("decay of the second moment", quantity="number", default=0.95, at_least=0, at_most=0.9999999)
    epsilon: float = setting("added to the root of the second moment", quantity="number", default=1e-8, above=0)
    weight_decay: float = setting(
        "decay of matrices (norms and biases have none)", quantity="number", default=0.1, at_least=0
    )
    grad_clip: float | None = setting(
        "joint L2 norm of all gradients is cut to this; none = no clipping", quantity="number", default=1.0, above=0
    )
    schedule: str = setting(
        "shape of the learning rate after warm-up", quantity="text", default="cosine", choices=SCHEDULES
    )
    warmup_steps: int = setting("steps of linear warm-up", default=0, at_least=0)
    decay_fraction: float = setting(
        "last share of the steps in which wsd falls", quantity="number", default=0.2, above=0, at_most=1
    )
    final_lr_ratio: float = setting(
        "last learning rate over the peak one", quantity="number", default=0.1, at_least=0, at_most=1
    )

    initial_weights: str | None = setting(
        "directory of the weights to begin with: an import, a checkpoint or a run; absent = initialized by the seed",
        quantity="text", default=None,
    )  # fmt: skip

    eval_every: int | None = setting("steps between evaluations; absent = only at the end", default=None, at_least=1)
    eval_sequences: int = setting("held-out sequences in one evaluation", default=64, at_least=1)
    checkpoint_every: int | None = setting(
        "steps between checkpoints; absent = only at the end", default=None, at_least=1
    )
    checkpoint_async: bool = setting(
        "steps go on while a checkpoint is written: only its copy to host memory is waited for",
        quantity="flag", default=False,
    )  # fmt: skip
    keep_last: int = setting("newest checkpoints kept", default=2, at_least=1)
    keep_every: int | None = setting(
        "checkpoints at multiples of this step are kept for good", default=None, at_least=1
    )
    seed: int = setting("seed of initialization, data order and dropout (each derived apart)", default=0, at_least=0)

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
    def optimizer_implementation(self) -> str:
        """fused, foreach or loop; where it is not given, the first that the optimizer has."""
        if self.optimizer_loop is not None:
            return self.optimizer_loop
        return IMPLEMENTATIONS[self.optimizer][0]

    @property
    def loss_in_chunks(self) -> bool:
        """Whether head and loss go through a part of the tokens at a time; else all logits come before the loss."""
        return self.loss in ("chunked", "fused")

    @property
    def compiles(self) -> bool:
        """Whether anything goes through torch.compile: the blocks or the loss."""
        return self.compile or self.loss == "compiled"

    @property
    def uncompiled(self) -> Recipe:
        """The same without torch.compile, as it runs operation by operation."""
        return replace(self, compile=False, loss="full" if self.loss == "compiled" else self.loss)

    @property
    def expert_capacity(self) -> float | None:
        """Places of an expert over its even share of the tokens; None where it takes all that it is sent."""
        if self.expert_dispatch == "dropless":
            return None
        return CAPACITY_FACTOR if self.capacity_factor is None else self.capacity_factor

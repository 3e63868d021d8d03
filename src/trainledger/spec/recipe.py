"""The recipe: how the model is trained."""

from __future__ import annotations

from collections.abc import Iterator

from trainledger.frozen import frozen
from trainledger.spec.problem import Problem
from trainledger.spec.setting import setting

PRECISIONS = ("fp32", "bf16-mixed")
OPTIMIZERS = ("adamw", "adam", "sgd", "momentum", "adagrad", "rmsprop")
OPTIMIZER_LOOPS = ("fused", "foreach", "loop")
SCHEDULES = ("cosine", "linear", "wsd", "constant")
CHECKPOINTING = ("none", "full")
ATTENTIONS = ("sdpa", "math")


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
        "fp32, or bf16 autocast over fp32 parameters", quantity="text", default="fp32", choices=PRECISIONS
    )
    attention: str = setting(
        "sdpa = PyTorch's fused kernel, math = scores written out", quantity="text", default="sdpa", choices=ATTENTIONS
    )
    activation_checkpointing: str = setting(
        "full = every block is run again in backward", quantity="text", default="none", choices=CHECKPOINTING
    )
    dropout: float = setting(
        "probability on embeddings and residual branches", quantity="number", default=0.0, at_least=0, at_most=0.99
    )
    compile: bool = setting("torch.compile each block", quantity="flag", default=False)

    optimizer: str = setting("optimizer", quantity="text", default="adamw", choices=OPTIMIZERS)
    optimizer_loop: str | None = setting(
        "fused, foreach or loop; absent = fused where torch has it, else foreach",
        quantity="text",
        default=None,
        choices=OPTIMIZER_LOOPS,
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
    keep_last: int = setting("newest checkpoints kept", default=2, at_least=1)
    keep_every: int | None = setting(
        "checkpoints at multiples of this step are kept for good", default=None, at_least=1
    )
    seed: int = setting("seed of initialization, data order and dropout (each derived apart)", default=0, at_least=0)

    @property
    def device_batch(self) -> int:
        """Sequences in one forward; the layout has one data-parallel rank so far."""
        return self.global_batch if self.micro_batch is None else self.micro_batch

    @property
    def grad_accum(self) -> int:
        return self.global_batch // self.device_batch

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
        """fused, foreach or loop; torch has no fused RMSProp."""
        if self.optimizer_loop is not None:
            return self.optimizer_loop
        return "foreach" if self.optimizer == "rmsprop" else "fused"

    def problems(self) -> Iterator[Problem]:
        if self.global_batch % self.device_batch:
            nearest = max(1, round(self.global_batch / self.device_batch)) * self.device_batch
            rule = f"must be a multiple of micro_batch = {self.device_batch}"
            yield Problem("recipe.global_batch", self.global_batch, rule, nearest)
        if (self.tokens is None) == (self.steps is None):
            yield Problem(
                "recipe.tokens",
                self.tokens,
                "give either tokens or steps, not both and not neither (--set recipe.steps= takes one out)",
            )
        if self.optimizer == "rmsprop" and self.optimizer_loop == "fused":
            yield Problem("recipe.optimizer_loop", "fused", "torch has no fused RMSProp", "foreach")
        if (self.tokens is None) != (self.steps is None) and self.warmup_steps > self.total_steps:
            rule = f"is longer than the run of {self.total_steps} steps"
            yield Problem("recipe.warmup_steps", self.warmup_steps, rule, self.total_steps)

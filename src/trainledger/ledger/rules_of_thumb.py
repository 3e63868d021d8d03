"""Rules of thumb for napkin calculations, each with its source, and the conventions by which FLOPs are counted.

Nothing here feeds the ledger. The ledger counts; these rules are compared with it so that the difference can be
seen. Every rule is plain arithmetic over its arguments (ints, arrays, symbols).

N parameters, D tokens, L layers, d model width, H heads, K head width, T sequence length, C training FLOPs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from trainledger.ledger.entry import Entry, Int
from trainledger.ledger.ledger import Ledger
from trainledger.ledger.model.parameters import parameters
from trainledger.ledger.rules import attended_pairs
from trainledger.spec.frozen import frozen
from trainledger.spec.layers import segments
from trainledger.spec.plain import table_beside
from trainledger.spec.run import Run

Number = Any  # int, float, array or symbol


@frozen
class Rule:
    """A rule of thumb: its formula as text, where it comes from, and what it leaves out."""

    name: str
    formula: str
    source: str
    leaves_out: str = ""


@frozen
class StateRecipe:
    """Bytes per parameter that stay for the whole run, term by term."""

    name: str
    title: str
    terms: Mapping[str, int]
    source: str

    @property
    def bytes_per_parameter(self) -> int:
        """The sum of the terms.

        >>> STATES["fp32-adamw"].bytes_per_parameter
        16
        """
        return sum(self.terms.values())


KAPLAN = "Kaplan et al. 2020, Scaling Laws for Neural Language Models (arXiv 2001.08361), section 2.1"
PALM = "Chowdhery et al. 2022, PaLM (arXiv 2204.02311), appendix B"
KORTHIKANTI = "Korthikanti et al. 2022, Reducing Activation Recomputation (arXiv 2205.05198), equation 1"
CHINCHILLA = "Hoffmann et al. 2022, Training Compute-Optimal Large Language Models (arXiv 2203.15556), table 3"
ADAM = "Kingma and Ba 2015, Adam (arXiv 1412.6980), section 3: exponential averages"

RULES: dict[str, Rule] = {}
Function = TypeVar("Function", bound=Callable[..., Number])


def rule(formula: str, source: str, leaves_out: str) -> Callable[[Function], Function]:
    """Put a function into `RULES` under its name."""

    def named(function: Function) -> Function:
        RULES[function.__name__] = Rule(function.__name__, formula, source, leaves_out)
        return function

    return named


# Written down and not derived from `optimizers/optimizers.toml`: a rule of thumb is what the ledger is compared with.
_WRITTEN: dict[str, dict[str, Any]] = table_beside(__file__)
STATES = {name: StateRecipe(name, **row) for name, row in _WRITTEN.items()}


@rule("C = 6 N D", KAPLAN, "attention scores, and the embedding counted as if multiplied")
def training_flops(parameters: Number, tokens: Number) -> Number:
    """C = 6 N D: 2 N per token forward and 4 N backward.

    >>> training_flops(70 * 10**9, 15 * 10**12) == 63 * 10**23
    True
    """
    return 6 * parameters * tokens


def parameters_of_flops(flops: Number, tokens: Number) -> Number:
    """The N of C = 6 N D."""
    return flops / (6 * tokens)


def tokens_of_flops(flops: Number, parameters: Number) -> Number:
    """The D of C = 6 N D."""
    return flops / (6 * parameters)


@rule("2 N", KAPLAN, "attention scores")
def forward_flops_per_token(parameters: Number) -> Number:
    """2 N: a multiply and an add for each parameter.

    >>> forward_flops_per_token(1_280_000_000)
    2560000000
    """
    return 2 * parameters


@rule("12 L d T", PALM, "causality: masked scores count")
def attention_flops_per_token(n_layers: Number, d_model: Number, seq_len: Number) -> Number:
    """12 L d T: scores and their weighted sum, forward and backward, masked scores included.

    >>> attention_flops_per_token(32, 4096, 8192)
    12884901888
    """
    return 12 * n_layers * d_model * seq_len


@rule(
    "L B T d (34 + 5 H T / d)",
    KORTHIKANTI,
    "logits; assumes 16-bit activations, unfused attention, GELU with d_ff = 4 d, dropout masks of a byte",
)
def activation_nbytes(n_layers: Number, batch: Number, seq_len: Number, d_model: Number, n_heads: Number) -> Number:
    """L B T d (34 + 5 H T / d): what the blocks of a 16-bit GPT keep for backward, without checkpointing.

    >>> activation_nbytes(1, 1, 2048, 12288, 96)
    2868903936
    """
    return n_layers * batch * seq_len * (34 * d_model + 5 * n_heads * seq_len)


@rule("2 B T d L", "napkin: one 16-bit tensor of the residual stream in each block", "all that is inside a block")
def activation_nbytes_napkin(n_layers: Number, batch: Number, seq_len: Number, d_model: Number) -> Number:
    """2 B T d L.

    >>> activation_nbytes_napkin(24, 8, 2048, 2048)
    1610612736
    """
    return 2 * batch * seq_len * d_model * n_layers


@rule("12 d^2 L", KAPLAN, "embeddings, norms, biases; assumes d_ff = 4 d")
def block_parameters(d_model: Number, n_layers: Number) -> Number:
    """12 d^2 L: four square matrices of attention and eight of the MLP.

    >>> block_parameters(2048, 24), block_parameters(1024, 12)
    (1207959552, 150994944)
    """
    return 12 * d_model**2 * n_layers


@rule("D = 20 N", CHINCHILLA, "data quality, and the cost of serving the model")
def compute_optimal_tokens(parameters: Number, tokens_per_parameter: Number = 20) -> Number:
    """D = 20 N.

    >>> compute_optimal_tokens(70 * 10**9)
    1400000000000
    """
    return tokens_per_parameter * parameters


def compute_optimal_parameters(flops: Number, tokens_per_parameter: Number = 20) -> Number:
    """N = sqrt(C / (6 x 20)), from C = 6 N D and D = 20 N.

    >>> round(compute_optimal_parameters(1.2e20))
    1000000000
    """
    return (flops / (6 * tokens_per_parameter)) ** 0.5


@rule("t = C / (devices x peak x MFU)", PALM, "restarts, evaluation, checkpoints")
def training_seconds(flops: Number, devices: Number, peak_flops_per_second: Number, mfu: Number) -> Number:
    """C / (devices x peak x MFU).

    >>> round(training_seconds(6.3e24, 1024, 989.5e12, 0.5) / 86400, 1)
    143.9
    """
    return flops / (devices * peak_flops_per_second * mfu)


@rule("1 / (1 - beta)", ADAM, "older values, e^-1 of the weight in all")
def averaging_steps(beta: Number) -> Number:
    """1 / (1 - beta): the sum of an exponential average's weights beta^i, over its newest.

    >>> round(averaging_steps(0.9)), round(averaging_steps(0.999))
    (10, 1000)
    """
    return 1 / (1 - beta)


def static_nbytes(parameters: Number, recipe: str) -> Number:
    """Bytes of parameters, gradients and optimizer state under one of `STATES`.

    >>> static_nbytes(70 * 10**9, "fp32-adamw")
    1120000000000
    """
    return parameters * STATES[recipe].bytes_per_parameter


# The conventions in use, each by name, of one and the same step


# Kernels that skip the pairs above the diagonal.
CAUSAL = ("_scaled_dot_product_flash_attention", "_scaled_dot_product_cudnn_attention")
DAO_2 = "the benchmarks of Dao 2023, FlashAttention-2 (arXiv 2307.08691), section 4.1"


@frozen
class Convention:
    """A way to count the FLOPs of a step: its name, its formula, who counts so, and the count."""

    name: str
    formula: str
    source: str
    flops: Callable[[Run, Ledger], Int]


def attended_share(run: Run) -> float:
    """The part that the masks leave, over all layers, of the query-key pairs that the ledger counts."""
    tokens, left, counted = run.recipe.seq_len, 0, 0
    for segment in segments(run.model):
        for kind in (kind for kind in segment.kinds if kind.attends):
            left += segment.count * attended_pairs(tokens, kind.window)
            known = kind.window if run.recipe.attention == "flash" else None
            counted += segment.count * attended_pairs(tokens, known, causal=False)
    return float(left / counted)


def _six_n(run: Run, ledger: Ledger) -> Int:
    return training_flops(parameters(run.model).active, ledger.tokens)


def _six_n_and_attention(run: Run, ledger: Ledger) -> Int:
    width: Int = 0  # of the heads of all layers
    # Global layers may have heads of their own (attention.in_global), so that widths are added up layer by layer.
    for segment in segments(run.model):
        for spec in (run.model.of_layers(kind.window) for kind in segment.kinds if kind.attends):
            width += segment.count * spec.attention.n_heads * spec.head_size
    per_token = attention_flops_per_token(1, width, run.recipe.seq_len)
    return _six_n(run, ledger) + per_token * ledger.tokens


def _causal(run: Run, ledger: Ledger) -> Int:
    attention = ledger.filter(is_attention).model_flops
    return round(ledger.model_flops - attention * (1 - attended_share(run)))


def _kernels(run: Run, ledger: Ledger) -> Int:
    # A fused kernel that is given a mask (the last of its sizes is 0) computes every pair.
    fused = ledger.filter(lambda entry: entry.kind == "attention" and entry.name.startswith(CAUSAL))
    causal = fused.filter(lambda entry: not entry.shape or bool(entry.shape[-1]))
    tokens, share = run.recipe.seq_len, attended_share(run)
    if run.recipe.attention != "flash":  # which knows windows itself; others have a mask in those layers
        share = attended_pairs(tokens, None) / attended_pairs(tokens, None, causal=False)
    return round(ledger.matmul_flops - causal.flops * (1 - share))


def is_attention(entry: Entry) -> bool:
    """Whether an entry multiplies queries with keys (an indexer's too) or probabilities with values, fused or not."""
    unfused = entry.path.endswith((".self_attn", ".self_attn.indexer"))
    return entry.kind == "attention" or (entry.kind == "matmul" and unfused)


CONVENTIONS = {
    convention.name: convention
    for convention in (
        Convention("6nd", "6 N", KAPLAN, _six_n),
        Convention("6nd+attention", "6 N + 12 L H K T", PALM, _six_n_and_attention),
        Convention(
            "dense",
            "matmuls of forward and backward, every query against every key",
            PALM,
            lambda run, ledger: ledger.model_flops,
        ),
        Convention("causal", "the same, but only the unmasked query-key pairs of attention", DAO_2, _causal),
        Convention(
            "kernels",
            "what the kernels run: recomputation too, flash kernels without masked pairs",
            "Dao et al. 2022, FlashAttention (arXiv 2205.14135)",
            _kernels,
        ),
    )
}

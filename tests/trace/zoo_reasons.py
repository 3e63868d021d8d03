"""Why FlopCounterMode tells other FLOPs than the trace: for each operator one reason, held against both counts."""

from __future__ import annotations

from collections.abc import Iterator

from zoo_compared import Comparison

REASONS = {
    "attention": "`_scaled_dot_product_flash_attention_for_cpu` and its backward have no formula in torch 2.13's "
    "registry and count 0. Ours counts two matmuls of queries and keys forward and five backward, as torch's formula "
    "for the kernels of CUDA does.",
    "groups": "`convolution_backward` with groups: the weights' gradient is counted as if every output channel met "
    "every input channel, `groups` times too many. With a rule that counts each wanted gradient as often as the "
    "forward (`custom_mapping`), FlopCounterMode gives our number.",
    "experts": "`_grouped_mm`, the matmuls of many experts at once, has no formula and counts 0. Ours counts every "
    "row once.",
    "recurrent": "`mkldnn_rnn_layer`, oneDNN's LSTM, and its backward have no formula and count 0. Ours counts the "
    "matmuls of each step's input and state with their matrices, twice as many backward.",
    "vectors": "`mv`, `addmv`, `dot` and `vdot`, matmuls with a vector, have no formula and count 0.",
}
_OPERATORS = {
    "attention": (
        "_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_flash_attention_for_cpu_backward"
    ),
    "experts": ("_grouped_mm",),
    "recurrent": ("mkldnn_rnn_layer", "mkldnn_rnn_layer_backward"),
    "vectors": ("mv", "addmv", "dot", "vdot"),
}  # fmt: skip
REASON_OF = {operator: key for key, operators in _OPERATORS.items() for operator in operators}


def differing(c: Comparison) -> Iterator[tuple[str, str]]:
    """Operators whose FLOPs differ, with the reason; an empty one where none holds."""
    ours, theirs = c.flops, c.truth.flops
    for operator in sorted({*ours, *theirs}):
        mine, other = ours.get(operator, 0), theirs.get(operator, 0)
        if mine == other:
            continue
        if operator == "convolution_backward":
            yield operator, "groups" if mine == c.truth.corrected[operator] < other else ""
        else:
            yield operator, REASON_OF.get(operator, "") if other == 0 else ""


def keys_of(c: Comparison) -> list[str]:
    """The reasons of one model, each once."""
    return list(dict.fromkeys(key or f"{operator}?" for operator, key in differing(c)))

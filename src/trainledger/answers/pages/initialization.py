"""The start of a model: rule and deviation of each kind of tensor, and the variance of the residual stream by depth."""

from __future__ import annotations

from typing import Any

from trainledger.ledger.model.parameters import leaves_of
from trainledger.report.document import Cell, Document, Table, sections
from trainledger.spec.initialization import TRUNCATION, start_of, stream_variances
from trainledger.spec.run import Run

_VECTORS = "Weights of norms begin at 1 (at 0 where the norm multiplies by 1 + weight), all other vectors at 0."
_ASSUMED = "embeddings independent, attention scores and the MLP's inputs normal with variance 1"
_MEASURED = "real models of hidden size 128 were within 3 %, with tied embeddings up to 25 % above"


def initialization_page(run: Run) -> Document:
    """A row for each kind of matrix, then the predicted variance before the first block and after some."""
    spec = run.model
    tensors: dict[str, dict[str, Any]] = {}
    for leaf in leaves_of(spec, run.recipe).every():
        name = ".".join(part for part in leaf.path.split(".") if not part.isdigit())
        if leaf.decayed:
            rule, deviation = start_of(leaf.path, int(leaf.shape[-1]), spec, run.width_factor)
            tensors[name] = {"shape": [*map(int, leaf.shape)], "rule": rule, "deviation": deviation}
    stream = stream_variances(spec, run.recipe.seq_len)
    rows: list[tuple[Cell, ...]] = [
        (name, str(tensor["shape"]), tensor["rule"], f"{tensor['deviation']:.4g}") for name, tensor in tensors.items()
    ]
    said: Any = "The residual stream's variance is not predicted: of experts, norms on outputs and other activations."
    if stream is not None:
        depths = sorted({round(at * spec.n_layers / 4) for at in range(5)})
        by_depth = tuple((depth, f"{stream[depth]:.4g}", "assumed") for depth in depths)
        said = Table("stream", ("layers", "residual variance", "basis"), by_depth, units=("integer",), align="rrl")
    verdict = f"{spec.name}: matrices are normal, truncated at {TRUNCATION:g} standard deviations"
    ends = "" if stream is None else f"; residual stream variance from {stream[0]:.3g} to {stream[-1]:.3g}"
    return Document(
        title=f"initialization of {spec.name}",
        verdict=f"{verdict}{ends}.",
        sections=sections(
            Table("tensors", ("tensor", "shape", "rule", "deviation"), tuple(rows), align="lllr"),
            (_VECTORS,),
            said,
            f"Assumed: {_ASSUMED}; {_MEASURED}." if stream is not None else None,
        ),
        data=lambda: {
            "model": spec.name,
            "truncation": TRUNCATION,
            "tensors": tensors,
            "stream_variances": None if stream is None else list(stream),
            "basis": "assumed",
        },
    )

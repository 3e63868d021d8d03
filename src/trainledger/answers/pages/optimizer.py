"""The update rule of an optimizer: its formulas, states, FLOPs and source."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

from trainledger.ledger.core.graph import Leaf
from trainledger.ledger.model.parameters import leaves_of, parameters
from trainledger.ledger.optimizers.formulas import MEANINGS, SYMBOLS, flops_per_parameter, formulas_of
from trainledger.ledger.optimizers.states import state_nbytes, states_of
from trainledger.report.document import Cell, Code, Document, Table, section, sections
from trainledger.spec.dtypes import nbytes_in
from trainledger.spec.model import ModelSpec
from trainledger.spec.optimizers import OPTIMIZERS
from trainledger.spec.problem import InvalidInput, Problem
from trainledger.spec.recipe import Recipe
from trainledger.spec.units import format_amount

_SHAPE = (4096, 1024)  # the matrix whose states are shown
_RULE = "one for each addition, product, division, root, comparison or sign of an element; weight decay left out"


def recipe_of(kind: str, overrides: Any) -> Recipe:
    """A recipe in fp32 with an optimizer of the kind, its numbers the defaults."""
    if overrides:
        rule = "goes with a run: explain optimizer RUN --set recipe.optimizer.beta2=0.99"
        raise InvalidInput([Problem("--set", None, rule)])
    return Recipe(seq_len=1, global_batch=1, steps=1, optimizer=OPTIMIZERS[kind]())


def optimizer_page(recipe: Recipe) -> Document:
    """The lines of an update of a matrix, then of a vector where they differ by more than decay, and what they need."""
    optimizer = recipe.optimizer
    lines, flops, elements = formulas_of(optimizer), flops_per_parameter(optimizer), _SHAPE[0] * _SHAPE[1]
    of_vectors = formulas_of(optimizer, matrix=False)
    states = states_of(Leaf("up_proj.weight", _SHAPE), recipe)
    each = sum(state.nbytes for state in states) / elements
    rows: list[tuple[Cell, ...]] = []
    for state in states:
        symbol, size = SYMBOLS.get(state.name, f"scale of {SYMBOLS.get(state.name[:-6], '')}8"), state.nbytes / elements
        symbol = f"{symbol}8" if state.dtype == "uint8" else symbol
        rows.append((symbol, state.name, f"{state.dtype}{[*state.shape]}", f"{size:.4g}"))
    rows.append(("in all", "", "", f"{each:.4g}"))
    text = "\n".join((*lines, *of_vectors))
    constants = {one.name: getattr(optimizer, one.name) for one in fields(optimizer) if one.name in text}
    meant = {name: means for name, means in MEANINGS.items() if any(name in _names(line) for line in text.split("\n"))}
    docs = {one.name: one.metadata["doc"] for one in fields(optimizer)}
    known: list[tuple[Cell, ...]] = [("w, g, lr", "weights, gradient, learning rate of the step; states begin at zero")]
    known += meant.items()
    known += [(name, f"{format_amount(value)}: {docs[name]}") for name, value in constants.items()]
    also = None if {*of_vectors} <= {*lines} else section("Of a vector (norms, biases)", Code("\n".join(of_vectors)))
    source = (type(optimizer).__doc__ or "").partition("\n")[0].replace("`", "")
    return Document(
        title=f"optimizer {optimizer.kind}",
        verdict=f"{optimizer.kind}: {flops} FLOPs and {each:.4g} bytes of state for each parameter.",
        sections=sections(
            section(f"The update of a matrix: {source}", Code("\n".join(lines))),
            also,
            Table("symbols", ("", "means"), tuple(known), align="ll"),
            Table("states", ("state", "torch.optim", f"of {[*_SHAPE]}", "bytes/parameter"), tuple(rows), align="lllr"),
            f"FLOPs: {_RULE}. Lines are Python over torch's functions; decay is of matrices only.",
        ),
        data=lambda: {
            "optimizer": optimizer.kind,
            "formulas": list(lines),
            "formulas_of_vectors": list(of_vectors),
            "constants": constants,
            "flops_per_parameter": flops,
            "state_bytes_per_parameter": each,
            "states": [{"name": state.name, "dtype": state.dtype, "shape": list(state.shape)} for state in states],
            "source": source,
        },
    )


def _names(line: str) -> set[str]:
    found = "".join(each if each.isalnum() or each == "_" else " " for each in line)
    return set(found.split())


def optimizers_table(spec: ModelSpec, recipe: Recipe) -> Table:
    """Bytes per parameter of a model under each optimizer in a recipe's precision, and what that is in all."""
    precision, leaves = recipe.precision, leaves_of(spec)
    elements = parameters(spec).total
    own = [
        nbytes_in(1, dtype) if dtype else 0 for dtype in (precision.parameters, precision.gradients, precision.master)
    ]
    states = {kind: state_nbytes(leaves, replace(recipe, optimizer=cls())) for kind, cls in OPTIMIZERS.items()}
    rows = tuple(
        (kind, *own, round(nbytes / elements, 2), round(sum(own) + nbytes / elements, 2), sum(own) * elements + nbytes)
        for kind, nbytes in states.items()
    )
    columns = ("optimizer", "parameters", "gradients", "master copy", "state", "bytes per parameter", "in all")
    units = ("", *5 * ("amount",), "nbytes")
    return Table("optimizers", columns, rows, units=units, align="lrrrrrr")

"""A run whose sizes are symbols: the same cost rules, handed letters instead of numbers."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from trainledger.ledger.entry import Entry
from trainledger.ledger.ledger import Ledger
from trainledger.ledger.ranks import account_of_stage
from trainledger.spec.frozen import frozen
from trainledger.spec.layers import period_of, segments
from trainledger.spec.parts import with_fields
from trainledger.spec.plain import table_beside
from trainledger.spec.problem import InvalidInput, Problem, nearest_text
from trainledger.spec.run import Run

if TYPE_CHECKING:
    from sympy import Expr, Symbol

MEANINGS: dict[str, str] = table_beside(__file__)
FREE = ("B", "A", "T", "L", "D", "F", "V")


@frozen
class Symbolic:
    """A ledger of formulas, the run that it is of with symbols in it, and the number of each symbol.

    It is of a rank of ``stage``, counted from 0.
    """

    ledger: Ledger
    values: dict[Symbol, int]
    run: Run
    stage: int = 0

    def number(self, amount: Any) -> int:
        """The value of a formula with the run's numbers."""
        return int(amount.xreplace(self.values)) if hasattr(amount, "xreplace") else int(amount)


def symbolic(run: Run, *, backend: str = "cpu", only: Iterable[str] | None = None, stage: int = 0) -> Symbolic:
    """The account of a run with symbols for its sizes; ``only`` names those that stay free, all if absent.

    Of a run with a layout it is the rank of one ``stage`` of its pipeline. A size of one stays a number, as torch runs
    other operations there; so does whatever decides here which operations run. Raises `InvalidInput` where a name of
    ``only`` is no size of this run, or decides which operations run.
    """
    numbers = _numbers(run)
    wanted = set(numbers) if only is None else set(only)
    for name in wanted - set(numbers):
        rule = f"must be one of {', '.join(each for each in FREE if each in numbers)}"
        raise InvalidInput([Problem("--symbolic", name, rule, nearest_text(name, FREE))])
    fixed = {"L"} if _patterned(run) or run.layout.pipeline != 1 else set()
    if only is not None:
        return _free(run, numbers, wanted, fixed, backend, stage)
    if run.layout.pipeline != 1:
        fixed.add("A")  # how many micro-batches are under way is a minimum of two numbers
    free = [name for name in numbers if numbers[name] > 1 and name not in fixed]
    exact = account_of_stage(run, stage, backend=backend)
    for without in ((), ("H", "G"), ("H", "G", "K", "D", "F", "V", "L")):
        found = _formulas(run, numbers, [name for name in free if name not in without], backend, stage)
        if found is not None and _same(found, exact):
            return found
    return _account(run, numbers, [], backend, stage)


def _free(
    run: Run, numbers: Mapping[str, int], wanted: set[str], fixed: set[str], backend: str, stage: int
) -> Symbolic:
    """Formulas in the wanted sizes alone, checked against the numbers of two small runs."""
    found = None if wanted & fixed else _formulas(run, numbers, sorted(wanted), backend, stage)
    least = max(smallest(run, name) for name in wanted)
    for size in (least + 1, least + 2):
        if found is None:
            break
        there = {**numbers, **dict.fromkeys(wanted, size)}
        exact = _account(run, there, [], backend, stage)
        if not _same(replace(found, values={symbol: there[str(symbol)] for symbol in found.values}), exact.ledger):
            found = None
    if found is None:
        rule = "decides which operations run in this run, and cannot be left free"
        raise InvalidInput([Problem("--symbolic", ", ".join(sorted(wanted)), rule)])
    return found


def smallest(run: Run, name: str) -> int:
    """The least that a size of this run can be."""
    return run.model.least_seq_len if name == "T" else 1


def _formulas(run: Run, numbers: Mapping[str, int], names: Iterable[str], backend: str, stage: int) -> Symbolic | None:
    """The account with symbols for these sizes; None where a comparison of one decides what happens."""
    try:
        return _account(run, numbers, names, backend, stage)
    except TypeError as undecided:
        if "truth value" not in str(undecided):
            raise
        return None


def _numbers(run: Run) -> dict[str, int]:
    spec, recipe = run.model, run.recipe
    sizes: dict[str, int | None] = {
        "B": run.device_batch, "A": run.grad_accum, "T": recipe.seq_len, "S": spec.max_seq_len,
        "V": spec.padded_vocab, "L": spec.n_layers, "D": spec.d_model, "F": spec.feed_forward.d_ff,
        "H": spec.attention.n_heads, "G": spec.kv_heads if spec.kv_heads != spec.attention.n_heads else None,
        "K": None if spec.latent else spec.head_size, "M": spec.experts.width if spec.experts else None,
        "R": spec.latent.kv_rank if spec.latent else None, "P": spec.latent.q_rank if spec.latent else None,
    }  # fmt: skip
    return {name: size for name, size in sizes.items() if size is not None}


def _patterned(run: Run) -> bool:
    """Whether the number of layers decides which kinds of layers there are, by a pattern longer than the model too."""
    dense = run.model.experts is not None and run.model.experts.n_dense_layers > 0
    listed = dense or run.model.layers is not None
    return listed or period_of(run.model) > 1 or len(segments(run.model)) > 1


def _account(run: Run, numbers: Mapping[str, int], names: Iterable[str], backend: str, stage: int) -> Symbolic:
    import sympy

    # Rope turns pairs: an even head width halves without a remainder.
    symbols = {
        name: sympy.Symbol(
            name, positive=True, **({"even": True} if name == "K" and not numbers[name] % 2 else {"integer": True})
        )
        for name in names
    }
    size: dict[str, Any] = {**numbers, **symbols}
    values = {symbol: numbers[name] for name, symbol in symbols.items()}
    heads = size["H"]
    if "G" in symbols:
        # Grouped heads: H = G x (queries per key), so that the quotient that decides what is copied is one symbol.
        per_group = sympy.Symbol("Q", integer=True, positive=True)
        heads, values[per_group] = size["G"] * per_group, numbers["H"] // numbers["G"]
    fields = {
        "vocab_size": size["V"], "vocab_multiple": 1, "n_layers": size["L"], "d_model": size["D"],
        "max_seq_len": size["S"], "attention.n_heads": heads, "attention.n_kv_heads": size.get("G"),
        "attention.head_dim": size.get("K"), "attention.kv_rank": size.get("R"), "attention.q_rank": size.get("P"),
        "feed_forward.d_ff": size["F"], "feed_forward.expert_d_ff": size.get("M"),
    }  # fmt: skip
    model = with_fields(run.model, fields)
    batch = size["B"] * size["A"] * run.layout.data_ranks
    recipe = replace(run.recipe, global_batch=batch, micro_batch=size["B"], seq_len=size["T"])
    with_symbols = replace(run, model=model, recipe=recipe)
    ledger = account_of_stage(with_symbols, stage, backend=backend)
    return Symbolic(_named_heads(ledger) if "G" in symbols else ledger, values, with_symbols, stage)


def named_heads(amount: Any) -> Any:
    """A formula in which G Q, key-value heads times the queries of each, is written as H."""
    if not hasattr(amount, "subs"):
        return amount
    import sympy

    G, Q = (sympy.Symbol(name, integer=True, positive=True) for name in "GQ")
    return amount.subs(G * Q, sympy.Symbol("H", integer=True, positive=True))


def _named_heads(ledger: Ledger) -> Ledger:
    def entry(each: Entry) -> Entry:
        amounts = {
            name: named_heads(getattr(each, name)) for name in ("flops", "model_flops", "read", "written", "kept")
        }
        allocated = tuple((category, named_heads(nbytes)) for category, nbytes in each.allocated)
        freed = tuple((category, named_heads(nbytes)) for category, nbytes in each.freed)
        return replace(each, allocated=allocated, freed=freed, **amounts)

    resident = tuple((category, named_heads(nbytes)) for category, nbytes in ledger.resident)
    entries = tuple(entry(each) for each in ledger.entries)
    return replace(ledger, entries=entries, resident=resident, parameters=named_heads(ledger.parameters))


def _same(found: Symbolic, exact: Ledger) -> bool:
    """Whether the formulas give the numbers of the run, operation by operation."""
    if len(found.ledger) != len(exact):
        return False
    return all(
        mine.name == theirs.name
        and all(found.number(getattr(mine, amount)) == getattr(theirs, amount) for amount in ("flops", "kept", "times"))
        for mine, theirs in zip(found.ledger, exact, strict=True)
    )


def expanded(amount: Any) -> Any:
    """A formula multiplied out, quotients inside a floor cancelled."""
    if not hasattr(amount, "expand"):
        return amount
    import sympy

    whole = amount.expand()
    floors = {atom: sympy.floor(sympy.cancel(atom.args[0])) for atom in whole.atoms(sympy.floor)}
    return whole.xreplace(floors).expand() if floors else whole


def formula(amount: Any) -> str:
    """A formula as people write it: products without a sign, powers with ``^``.

    >>> import sympy
    >>> B, T = sympy.symbols("B T", positive=True)
    >>> formula(4 * B * T**2 + 8 * B)
    '4 B T^2 + 8 B'
    """
    if not hasattr(amount, "free_symbols"):
        return f"{amount:,}" if isinstance(amount, int) else str(amount)
    import sympy

    return str(sympy.sstr(amount, order="grlex")).replace("**", "^").replace("*", " ").replace("ceiling(", "ceil(")


def with_numbers(expression: Expr | int, values: Mapping[Symbol, int]) -> str:
    """The formula with its numbers in place of the symbols, not yet worked out.

    >>> import sympy
    >>> B, T = sympy.symbols("B T", positive=True)
    >>> with_numbers(4 * B * T**2, {B: 2, T: 1024})
    '4 x 2 x 1,024^2'
    """
    words = formula(expression).replace("(", "( ").replace(")", " )").split(" ")
    names = {str(symbol): value for symbol, value in values.items()}
    put_in: list[str] = []
    for word in words:
        put_in.append(re.sub(r"[A-Za-z]\w*", lambda name: f"{names[name[0]]:,}" if name[0] in names else name[0], word))
    shown = ""
    for at, word in enumerate(put_in):
        joined = at > 0 and word[0] not in "+-)" and put_in[at - 1][-1] not in "+-(,"
        shown += (" x " if joined else " " if at else "") + word
    return shown.replace("( ", "(").replace(" )", ")")


def settled(amount: Any, values: Mapping[Symbol, int]) -> Any:
    """A formula with the same value for these sizes, without what they decide.

    Of a minimum or a maximum it has the part that these sizes make it; a quotient that is whole with them is not
    rounded, and one that is rounded up is a ``ceiling``, not a ``floor`` of what is below zero.

    >>> import sympy
    >>> D, F, L = sympy.symbols("D F L", integer=True, positive=True)
    >>> settled(4 * D * sympy.Min(1, L - 1) - 8 * D * sympy.floor(-F / 32), {D: 512, F: 64, L: 4})
    D*F/4 + 4*D
    >>> settled(-8 * D * sympy.floor(-F / 32), {D: 512, F: 65})
    8*D*ceiling(F/32)
    """
    if not hasattr(amount, "replace"):
        return amount
    import sympy

    def number(part: Any) -> Any:
        return part.xreplace(values)

    def decided(one: Any) -> Any:
        most = isinstance(one, sympy.Max)
        # Of equal parts the shorter.
        return min(one.args, key=lambda argument: (-number(argument) if most else number(argument), len(str(argument))))

    def divided(one: Any) -> Any:
        (quotient,) = one.args
        if number(quotient).is_integer:
            return quotient
        return one.func(sympy.cancel(quotient))

    # From the innermost outwards: a quotient that is whole may be a part of another.
    whole = amount.replace(lambda each: isinstance(each, (sympy.Min, sympy.Max)), decided)
    whole = whole.replace(lambda each: isinstance(each, (sympy.floor, sympy.ceiling)), divided)
    return rounded_up(whole.expand())


def rounded_up(amount: Any) -> Any:
    """A formula in which what is rounded up says so: ``ceiling(x)`` for ``-floor(-x)``, as of pieces of a shard.

    >>> import sympy
    >>> rounded_up(-8 * sympy.floor(-sympy.Symbol("F") / 32))
    8*ceiling(F/32)
    """
    if not hasattr(amount, "replace"):
        return amount
    import sympy

    return amount.replace(
        lambda each: isinstance(each, sympy.floor) and each.args[0].could_extract_minus_sign(),
        lambda each: -sympy.ceiling(-each.args[0]),
    )

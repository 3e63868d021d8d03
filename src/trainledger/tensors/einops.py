"""Patterns in einops' notation, such as ``b (h d) t -> b h t d``: sizes, FLOPs, and which of their steps copy.

A pattern names every dim; brackets make several dims one. Names that vanish are reduced, names that come are repeated
(Rogozhnikov 2022, Einops, ICLR: rearrange, reduce and repeat). Each pattern becomes the steps that einops takes on
torch: part the dims, order them, reduce or expand, and put them together again.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import reduce as folded
from operator import mul
from typing import Any

from trainledger.ledger.rules import FLOPS_PER_ELEMENT
from trainledger.spec.frozen import frozen
from trainledger.spec.problem import InvalidInput, Problem, nearest_text
from trainledger.tensors.copies import fresh, reshape
from trainledger.tensors.einsum import MOST_DIMS
from trainledger.tensors.strided import Chain, ChainStep, Strided, list_text, row_major
from trainledger.tensors.views import CannotApply, Outcome, expand, permute

REDUCTIONS = ("mean", "sum", "max", "min", "prod", "any", "all")
_TOKEN = re.compile(r"\s*(\.\.\.|…|[A-Za-z_][A-Za-z0-9_]*|\d+|[()])", re.ASCII)
LONGEST = 1000
Group = tuple[str, ...]


@frozen
class Rearranged:
    """A pattern on one tensor: its sizes by name, the steps, and FLOPs (one for each element that is reduced)."""

    pattern: str
    function: str
    sizes: dict[str, int]
    chain: Chain
    flops: int

    @property
    def result(self) -> Strided:
        return self.chain.result

    @property
    def view(self) -> bool:
        """Whether the result lies over the tensor's own storage, so that nothing is copied."""
        return self.chain.shares

    @property
    def moved_nbytes(self) -> int:
        """Bytes that copies and reductions read and write; 0 for a view."""
        before = [self.chain.start, *(step.result for step in self.chain.steps)]
        return sum(
            one.nbytes + step.written_nbytes
            for one, step in zip(before, self.chain.steps, strict=False)
            if not step.shares
        )


def rearranged(
    tensor: Strided, pattern: str, sizes: Mapping[str, int] | None = None, *, function: str = "", reduction: str = ""
) -> Rearranged:
    """A pattern on one tensor; ``function`` is one of einops', or nothing for the one that the names ask for.

    `InvalidInput` with a sentence where the pattern, the sizes and the tensor do not agree.

    >>> heads = rearranged(Strided("fp32", 4, (2, 64, 10), (640, 10, 1), 0, 5120), "b (h d) t -> b h t d", {"h": 8})
    >>> heads.result.shape, heads.view, heads.sizes
    ((2, 8, 10, 8), True, {'b': 2, 'h': 8, 'd': 8, 't': 10})
    """
    left, right = _spread(pattern, *_read(pattern), len(tensor.shape))
    _check_names(pattern, left, right)
    gone = [name for name in _names(left) if name not in _names(right)]
    come = [name for name in _names(right) if name not in _names(left)]
    meant = "reduce" if gone else "repeat" if come else "rearrange"
    _check_function(pattern, function or meant, gone, come, reduction)
    found = _sizes(pattern, left, right, tensor, dict(sizes or {}))
    steps = _steps(tensor, left, right, found, reduction)
    flops = FLOPS_PER_ELEMENT["reduction"] * tensor.elements if gone else 0
    shown = {name: size for name, size in found.items() if not name[0].isdigit()}
    return Rearranged(_text(pattern), function or meant, shown, Chain(tensor, steps), flops)


def is_pattern(equation: str, shapes: Sequence[Sequence[int]], sizes: Mapping[str, int], reduction: str | None) -> bool:
    """Whether a text is a pattern on one tensor, and not an equation of einsum: it has brackets or numbers, sizes or a
    reduction come with it, or it is in words and has names on one side only.

    >>> is_pattern("b (h d) -> b h d", [(2, 8)], {}, None), is_pattern("ij->ji", [(2, 8)], {}, None)
    (True, False)
    """
    left, arrow, right = equation.partition("->")
    if "," in equation or not arrow:
        return False
    words = left.split()
    spaced = len(words) > 1 and any(len(word) > 1 for word in (*words, *right.split()))
    new = set(right.split()) - set(words)
    marked = set("()0123456789") & set(re.sub(r"[A-Za-z_]\w*", "", equation))
    return bool(marked or sizes or reduction or (spaced and new))


def read_sizes(words: Sequence[str]) -> tuple[list[str], dict[str, int]]:
    """Words such as ``h=8`` separated from others, as sizes by name; `InvalidInput` with a sentence otherwise.

    >>> read_sizes(["2,64,10", "h=8"])
    (['2,64,10'], {'h': 8})
    """
    sizes: dict[str, int] = {}
    for word in words:
        name, equals, size = word.partition("=")
        if equals:
            if not (name.strip().isidentifier() and re.fullmatch(r"\d{1,18}", size.strip(), re.ASCII)):
                raise InvalidInput([Problem("size", word, "is no size of a dim; write it like h=8")])
            sizes[name.strip()] = int(size)
    return [each for each in words if "=" not in each], sizes


def _text(pattern: str) -> str:
    return " ".join(pattern.replace("->", " -> ").split())


def _read(pattern: str) -> tuple[list[Group | None], list[Group | None]]:
    """Both sides as groups of names, None for a separate ellipsis; numbers are names too."""
    sides = pattern[:LONGEST].split("->")
    if len(sides) != 2 or len(pattern) > LONGEST:
        raise InvalidInput([Problem("pattern", pattern, "names dims before and after one ->", "b (h d) t -> b h t d")])
    left, right = (_side(pattern, each, side) for side, each in enumerate(sides))
    return left, right


def _side(pattern: str, text: str, side: int) -> list[Group | None]:
    groups: list[Group | None] = []
    inside: list[str] | None = None
    place = 0
    while text[place:].strip():
        match = _TOKEN.match(text, place)
        if match is None:
            rule = f"has {text[place:].strip()[:10]!r}, which is neither a name, a number, a bracket nor an ellipsis"
            raise InvalidInput([Problem("pattern", pattern, rule, "b (h d) t -> b h t d")])
        place, word = match.end(), match[1].replace("…", "...")
        if word in "()":
            if (word == "(") != (inside is None):
                rule = "has a bracket that does not close, or one in another"
                raise InvalidInput([Problem("pattern", pattern, rule)])
            if inside is not None:
                groups.append(tuple(inside))
            inside = [] if word == "(" else None
            continue
        if word.isdigit():
            size = int(word)
            if size == 0:
                raise InvalidInput([Problem("pattern", pattern, "has a dim of 0; sizes in a pattern begin at 1")])
            # A number is a dim without a name: known by its position, and of size 1 no dim at all.
            word = "" if size == 1 else f"{size}@{side}.{place}"
        tokens = [word] if word else []
        if inside is not None:
            inside += tokens
        else:
            groups.append(None if word == "..." else tuple(tokens))
    if inside is not None:
        raise InvalidInput([Problem("pattern", pattern, "has a bracket that does not close", f"{pattern})")])
    return groups


def _spread(
    pattern: str, left: list[Group | None], right: list[Group | None], dims: int
) -> tuple[list[Group], list[Group]]:
    """Both sides with a name for each dim of an ellipsis."""
    ellipses = [sum(each is None or "..." in each for each in side) for side in (left, right)]
    if max(ellipses) > 1 or any(each is not None and each.count("...") > 1 for each in (*left, *right)):
        raise InvalidInput([Problem("pattern", pattern, "has two ellipses on one side")])
    if any(each is not None and "..." in each for each in left):
        rule = "has an ellipsis in brackets before the ->, so that the dims to split are ambiguous"
        raise InvalidInput([Problem("pattern", pattern, rule)])
    if ellipses[1] and not ellipses[0]:
        raise InvalidInput([Problem("pattern", pattern, "has an ellipsis after the -> and none before it")])
    count = dims - len(left) + ellipses[0]
    if count < 0 or (count and not ellipses[0]):
        rule = f"names {len(left) - ellipses[0]} dims before the ->, and the tensor has {dims}"
        raise InvalidInput([Problem("pattern", pattern, rule)])
    names = tuple(f"...{at}" for at in range(count))

    def spread(side: list[Group | None]) -> list[Group]:
        made: list[Group] = []
        for group in side:
            if group is None:
                made += [(name,) for name in names]
            else:
                made.append(tuple(name for word in group for name in (names if word == "..." else (word,))))
        return made

    return spread(left), spread(right)


def _names(side: Sequence[Group]) -> list[str]:
    return [name for group in side for name in group]


def _check_names(pattern: str, left: Sequence[Group], right: Sequence[Group]) -> None:
    for side, where in ((left, "before"), (right, "after")):
        names = _names(side)
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise InvalidInput([Problem("pattern", pattern, f"names {twice} twice {where} the ->")])
        if max(len(side), len(names)) > MOST_DIMS:
            raise InvalidInput([Problem("pattern", pattern, f"has more than {MOST_DIMS} dims")])


def _check_function(pattern: str, function: str, gone: Sequence[str], come: Sequence[str], reduction: str) -> None:
    """Whether names vanish and come as a function of einops allows."""
    said = ", ".join(_plain(each) for each in (gone or come))
    if gone and come:
        rule = f"has {', '.join(map(_plain, gone))} only before and {', '.join(map(_plain, come))} only after the ->"
        raise InvalidInput([Problem("pattern", pattern, rule)])
    if (gone and function != "reduce") or (come and function != "repeat"):
        does = "reduce" if gone else "repeat"
        rule = f"has {said} only {'before' if gone else 'after'} the ->, which {function} does not do"
        if function == "rearrange":
            rule = f"has {said} on one side of the -> only, and rearrange keeps all dims"
        raise InvalidInput([Problem("pattern", pattern, rule, does)])
    if gone and reduction not in REDUCTIONS:
        rule = f"removes {said} without saying how to reduce ({', '.join(REDUCTIONS)})"
        if reduction:
            near = nearest_text(reduction, REDUCTIONS)
            raise InvalidInput([Problem("reduction", reduction, f"is none of {', '.join(REDUCTIONS)}", near)])
        raise InvalidInput([Problem("pattern", pattern, rule, "mean")])


def _plain(name: str) -> str:
    return name.partition("@")[0]


def _sizes(
    pattern: str, left: Sequence[Group], right: Sequence[Group], tensor: Strided, given: dict[str, int]
) -> dict[str, int]:
    """The size of every name, from the tensor's dims and from what is given."""
    names = dict.fromkeys((*_names(left), *_names(right)))
    for name, size in given.items():
        if name not in names:
            near = nearest_text(name, [each for each in names if each[0].isalpha()])
            raise InvalidInput([Problem(name, size, "is a size of no dim in the pattern", near)])
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise InvalidInput([Problem(name, size, "must be a whole number of elements above 0", 1)])
    known = given | {name: int(_plain(name)) for name in names if name[0].isdigit()}
    for dim, (group, size) in enumerate(zip(left, tensor.shape, strict=True)):
        open_names = [each for each in group if each not in known]
        product = folded(mul, (known[each] for each in group if each in known), 1)
        shown = " ".join(map(_plain, group)) or "1"
        if len(open_names) > 1:
            rule = f"splits dim {dim} of {size} into {shown}; give the size of all but one"
            raise InvalidInput([Problem("pattern", pattern, rule, f"{open_names[0]}=1")])
        if size % product or (not open_names and product != size):
            rule = f"has {shown} = {product:,} in dim {dim}" if not open_names else f"splits dim {dim} by {product:,}"
            single = len(group) == 1 and group[0] in given
            rule = f"{rule}, and {tensor.title} has {size:,} there"
            if single:
                raise InvalidInput([Problem(group[0], given[group[0]], rule, size)])
            fixed = next((each for each in group if each in given), None)
            near = f"{fixed}={_divisor(size, product)}" if fixed and open_names and len(group) == 2 else None
            raise InvalidInput([Problem("pattern", pattern, rule, near)])
        for name in open_names:
            known[name] = size // product
    missing = [each for each in names if each not in known]
    if missing:
        rule = f"introduces {', '.join(missing)}, whose size is not given"
        raise InvalidInput([Problem("pattern", pattern, rule, f"{missing[0]}=2")])
    return {name: known[name] for name in names}


def _divisor(size: int, near: int) -> int:
    """The divisor of a size that is nearest to a number, among those that are quick to find."""
    found = {each for at in range(1, min(1000, size) + 1) if size % at == 0 for each in (at, size // at)}
    return min(found, key=lambda each: abs(each - near), default=1)


def _steps(
    tensor: Strided, left: Sequence[Group], right: Sequence[Group], sizes: Mapping[str, int], reduction: str
) -> tuple[ChainStep, ...]:
    before, after = _names(left), _names(right)
    kept = [each for each in after if each in before]
    gone = [each for each in before if each not in after]
    steps: list[ChainStep] = []
    one = tensor

    def add(word: str, outcome: Outcome) -> None:
        nonlocal one
        one = outcome[0]
        written = 0 if outcome[1] in ("view", "same") else one.nbytes
        steps.append(ChainStep(word, one, outcome[1], written, outcome[2]))

    try:
        if any(len(group) != 1 for group in left):
            parted = tuple(sizes[each] for each in before)
            add(f"reshape({', '.join(map(str, parted))})", reshape(one, parted))
        order = [before.index(each) for each in (*kept, *gone)]
        if order != [*range(len(order))]:
            add(f"permute({', '.join(map(str, order))})", permute(one, tuple(order)))
        if gone:
            add(f"{reduction}({', '.join(map(_plain, gone))})", _reduced(one, len(kept), reduction))
        if len(after) > len(kept):
            held = iter(kept)
            shape = tuple(sizes[each] for each in after)
            with_ones = tuple(sizes[next(held)] if each in kept else 1 for each in after)
            add(f"reshape({', '.join(map(str, with_ones))})", reshape(one, with_ones))
            add(f"expand({', '.join(map(str, shape))})", expand(one, shape))
        if any(len(group) != 1 for group in right):
            made = tuple(folded(mul, (sizes[each] for each in group), 1) for group in right)
            add(f"reshape({', '.join(map(str, made))})", reshape(one, made))
    except CannotApply as reason:
        raise InvalidInput([Problem("pattern", None, reason.rule, reason.nearest)]) from None
    return tuple(steps)


def _reduced(tensor: Strided, kept: int, reduction: str) -> Outcome:
    """A reduction of all dims after the first ``kept``."""
    dtype, itemsize = tensor.dtype, tensor.itemsize
    whole = dtype in ("int64", "int32", "int16", "int8", "uint8", "bool")
    if reduction == "mean" and whole:
        raise CannotApply(f"takes the mean of {dtype}, and torch takes it of floating-point numbers", "sum")
    if reduction in ("any", "all"):
        dtype, itemsize = "bool", 1
    elif reduction in ("sum", "prod") and whole:
        dtype, itemsize = "int64", 8
    shape = tensor.shape[:kept]
    why = f"dims {list_text(tensor.shape[kept:])} become one number"
    return fresh(tensor, shape, row_major(shape), "result", why, dtype=dtype, itemsize=itemsize)


def operation(function: str) -> Any:
    """One of einops' functions as a step of a chain, written as in Python: rearrange("b c -> c b", c=2)."""

    def apply(tensor: Strided, pattern: Any, *more: Any, **sizes: Any) -> Outcome:
        if not isinstance(pattern, str) or "->" not in pattern:
            raise CannotApply("takes a pattern of einops in quotes", f"{function}('a b -> b a')")
        how = [*more, *([sizes.pop("reduction")] if function == "reduce" and "reduction" in sizes else [])]
        if len(how) > (function == "reduce") or not all(isinstance(each, str) for each in how):
            raise CannotApply("takes a pattern" + (" and one reduction" if function == "reduce" else ""))
        try:
            made = rearranged(tensor, pattern, sizes, function=function, reduction=how[0] if how else "")
        except InvalidInput as error:
            first = error.problems[0]
            about = "" if first.field == "pattern" else f"{first.field} = {first.value} "
            near = None if first.nearest is None else str(first.nearest)
            raise CannotApply(f"{about}{first.rule}", near) from None
        words = " then ".join(step.word for step in made.chain.steps) or "nothing to do"
        copies = [step for step in made.chain.steps if not step.shares]
        if not copies:
            return made.result, "view" if made.chain.steps else "same", words
        return made.result, copies[-1].kind, f"{words}; {copies[-1].word} writes: {copies[-1].why}"

    return apply

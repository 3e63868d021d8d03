"""A problem of an input, as a sentence a person can act on."""

from __future__ import annotations

import re
from collections.abc import Iterable

from trainledger.spec.frozen import frozen

_LONGEST = 60
# C0 but newline and tab, DEL and C1 (ECMA-48): a terminal obeys them.
_CONTROLS = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}


@frozen
class Problem:
    """One thing wrong with one field: what it was, the rule it breaks, and the nearest value that works.

    ``value`` None says that the field was not given; ``nearest`` None says that no value is known to work.
    ``where`` is the file of the field, if that is not the file that the caller named; without a ``field``, it names
    the whole input that is wrong.

    >>> print(Problem("model.attention.n_heads", 7, "must divide d_model = 64", 8))
    model.attention.n_heads = 7: must divide d_model = 64; nearest that works: 8
    """

    field: str
    value: object
    rule: str
    nearest: object = None
    where: str = ""

    def __str__(self) -> str:
        where = f"{_printable(self.where)}: " if self.where else ""
        given = f" = {shown(self.value)}" if self.value is not None else ""
        field = f"{_short(_printable(self.field))}{given}: " if self.field else ""
        sentence = printable(f"{where}{field}{self.rule}")
        if self.nearest is None:
            return sentence
        nearest = self.nearest if isinstance(self.nearest, str) else shown(self.nearest)
        return f"{sentence}; nearest that works: {printable(nearest)}"


Refusal = tuple[str, object, str, object]  # field, value, rule, nearest: as `Problem` has them


class InvalidInput(ValueError):  # noqa: N818
    """The error of an invalid input, with every problem found; the command line prints each and exits with code 2."""

    def __init__(self, problems: list[Problem], where: str = "") -> None:
        self.problems = tuple(problems)
        where = "" if where == "." else where  # the directory that the person is in goes without saying
        self.where = where
        lines = [str(problem) for problem in problems]
        super().__init__("\n".join([f"{printable(where)}:", *("  " + line for line in lines)] if where else lines))
        self.__suppress_context__ = True  # a traceback shows these sentences, not what was tried before

    def __reduce__(self) -> tuple[type[InvalidInput], tuple[list[Problem], str]]:
        return InvalidInput, (list(self.problems), self.where)

    def _render_traceback_(self) -> list[str]:
        """The lines that IPython shows in a notebook in place of a traceback."""
        return [f"InvalidInput: {self}"]

    def placed(self) -> list[Problem]:
        """The problems, each with where it was found, to be collected with others."""
        return [
            Problem(problem.field, problem.value, problem.rule, problem.nearest, problem.where or self.where)
            for problem in self.problems
        ]


InvalidInput.__module__ = "trainledger"  # its public name, with which a traceback ends


def refuse_given(refusals: Iterable[Refusal]) -> None:
    """Raise `InvalidInput` with a problem for each value that is given: not false, 0, empty or None.

    >>> refuse_given([("recipe.dropout", 0, "is not trained", 0), ("recipe.compile", False, "is not trained", False)])
    """
    if problems := [Problem(*refusal) for refusal in refusals if refusal[1]]:
        raise InvalidInput(problems)


def shown(value: object) -> str:
    """A value of an input as short printable text, whatever it is.

    >>> shown(True), shown("15T"), shown({"a": 1}), shown("x" * 100)[-8:]
    ('true', "'15T'", 'a table', "xxxx...'")
    """
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, dict):
        return "a table"
    if isinstance(value, int) and value.bit_length() > 200:
        return f"a number of about {round(value.bit_length() * 0.30103)} digits"
    try:
        text = repr(value)
    except Exception:  # an input may be any object, and its repr any code
        return f"a {type(value).__name__}"
    return _short(text)


def printable(text: str) -> str:
    """Text that a terminal shows and does not obey: control characters but newline and tab as their escapes.

    >>> print(printable("a\\x1b[31mname"))
    a\\x1b[31mname
    """
    return text.translate(_CONTROLS)


def _printable(text: str) -> str:
    return text if text.isprintable() else repr(text)


def _short(text: str) -> str:
    if len(text) <= _LONGEST:
        return text
    return text[: _LONGEST - 4] + "..." + (text[-1] if text[-1] in "'\")]" else "")


def _has_in_order(parts: list[str], said: list[str]) -> bool:
    """Every word that was said is one of the parts of a name, in the same order."""
    left = iter(parts)
    return all(name in left for name in said)


def nearest_text(wanted: str, known: Iterable[str]) -> str | None:
    """The known word that a misspelt or shortened one probably means, or None where none is near enough.

    Near enough is one beginning, all its words in order, the same but for numbers, or one letter wrong (two of twelve).

    >>> nearest_text("lerning_rate", ["learning_rate", "seed"]), nearest_text("BF16", ["fp32", "bf16-mixed"])
    ('learning_rate', 'bf16-mixed')
    >>> nearest_text("int3", ["int8", "int4"]), nearest_text("llama-3-9b", ["llama-2-7b", "llama-3-70b", "llama-3-8b"])
    ('int4', 'llama-3-8b')
    >>> nearest_text("int46", ["int32", "int64"])  # digits that changed places
    'int64'
    >>> models = ["llama-7b", "llama-3-70b", "llama-3-8b", "llama-3.1-8b", "gpt2-large", "qwen2.5-7b"]
    >>> nearest_text("llama3", models), nearest_text("llama-8b", models)
    ('llama-3-8b', 'llama-3-8b')
    >>> nearest_text("vit-large", models), nearest_text("qwen2.5-vl-7b", models)  # other families
    (None, None)
    """
    by_lower = {word.lower(): word for word in known}
    lower = wanted[:100].lower()
    longer = [word for word in by_lower if word.startswith(lower)]
    if len(longer) == 1 and len(lower) > 1:
        return by_lower[longer[0]]
    said = [part for part in re.split(r"[-_./ ]|(?<=[a-z])(?=\d)", lower) if part]
    if len(said) > 1 and (all_of := [word for word in by_lower if _has_in_order(re.split(r"[-_./ ]", word), said)]):
        return by_lower[min(all_of, key=len)]
    but_for_numbers = re.sub(r"\d+", "0", lower)
    if numbered := [word for word in by_lower if re.sub(r"\d+", "0", word) == but_for_numbers]:
        return by_lower[min(numbered, key=lambda word: _numbers_off(word, lower))]
    wrong = {word: letters_wrong(lower, word) for word in by_lower}
    nearest = min(wrong, key=lambda word: wrong[word], default="")
    most = sum(max(len(_letters(lower)), len(_letters(nearest))) >= length for length in _LETTERS)
    return by_lower[nearest] if wrong and wrong[nearest] <= most else None


_LETTERS = (3, 12)  # of a word in which one letter may be wrong, and two
_OFF = len(_LETTERS) + 1


def _numbers_off(other: str, wanted: str) -> tuple[bool, list[int]]:
    pairs = zip(re.findall(r"\d+", other), re.findall(r"\d+", wanted), strict=True)
    return sorted(other) != sorted(wanted), [abs(int(one) - int(two)) for one, two in pairs]


def _letters(word: str) -> str:
    return re.sub(r"[-_. ]", "", word)


def letters_wrong(one: str, two: str) -> int:
    """Letters of one word that are missing, added, others or exchanged with the next; separators count for nothing.

    >>> letters_wrong("learning_rate", "lerning-rate"), letters_wrong("steps", "setps"), letters_wrong("epochs", "eps")
    (1, 1, 3)
    """
    one, two = _letters(one), _letters(two)
    if abs(len(one) - len(two)) >= _OFF:
        return _OFF
    before: list[int] = []
    last = list(range(len(two) + 1))
    for i, letter in enumerate(one, 1):
        row = [i]
        for j, other in enumerate(two, 1):
            row.append(min(last[j] + 1, row[-1] + 1, last[j - 1] + (letter != other)))
            if i > 1 < j and (letter, other) == (two[j - 2], one[i - 2]):
                row[-1] = min(row[-1], before[j - 2] + 1)
        before, last = last, row
    return last[-1]

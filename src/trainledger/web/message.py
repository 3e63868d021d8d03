"""A question as a message and its reply, both JSON: how a page asks the Python in its own browser."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from trainledger.answers.pages.plain_data import error_json
from trainledger.spec.problem import InvalidInput, Problem
from trainledger.web import answers
from trainledger.web.calculator import Progress

_WAYS: dict[str, Callable[[Mapping[str, Any], Progress], object]] = {
    "answer": lambda asked, progress: answers.answer(asked["name"], asked["query"], progress),
    "view": lambda asked, progress: answers.view(
        asked["name"],
        asked["query"],
        int(asked["width"]),
        progress,
        held=asked.get("held", ""),
        pinned=asked.get("pinned", ""),
    ),
    "check": lambda asked, _: answers.check(asked["name"], int(asked["seed"]), asked["guess"], int(asked["misses"])),
    "exercise": lambda asked, progress: answers.exercise(asked["name"], int(asked["seed"])),
}


def replied(message: str, progress: Progress) -> str:
    """The reply to a message ``{"call": "view", "name": ..., "query": {...}, ...}``: a ``result``, or an ``error``.

    >>> asked = {"call": "check", "name": "time", "seed": 1, "guess": "soon", "misses": 0}
    >>> json.loads(replied(json.dumps(asked), print))["error"][0]["field"]
    'guess'
    """
    asked = json.loads(message)
    try:
        return json.dumps({"result": _WAYS[asked["call"]](asked, progress)}, allow_nan=False)
    except InvalidInput as error:
        return json.dumps(error_json(error))
    except ModuleNotFoundError as error:
        rule = f"needs {error.name}, which this page does not have: pip install trainledger, and ask the command line"
        return json.dumps(error_json(InvalidInput([Problem(asked["name"], None, rule)])))

"""What fits on a kind of device: every question, asked of a run as it is and with changes that need less memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from trainledger import catalog
from trainledger.frozen import frozen
from trainledger.ledger.parameters import parameters
from trainledger.plan.family import family_of
from trainledger.plan.fit.held import Held, Scale, scale_of
from trainledger.plan.fit.questions import QUESTIONS, Found, ask, divides_batch
from trainledger.plan.fit.recipes import recipes
from trainledger.predict.predict import memory_of_device
from trainledger.predict.roofline import Machine
from trainledger.spec.problem import InvalidInput, Problem, nearest_text
from trainledger.spec.run import Run

Told = Callable[[int, int], None]


@frozen
class Row:
    """The answers for one recipe; ``settings`` are its lines for ``--set``."""

    name: str
    settings: tuple[str, ...]
    answers: dict[str, Found]


@frozen
class Fit:
    """What fits: a row for the run as it is, and one for each change on top of the one before.

    ``held`` is what the run itself holds; ``devices`` names the devices of the catalog that hold it as it is, the
    smallest first (None where the least memory was not asked for).
    """

    run: Run
    held: Held
    family: str
    rows: tuple[Row, ...]
    devices: tuple[str, ...] | None

    def __getitem__(self, question: str) -> Found:
        """The answer for the run as it is."""
        return self.rows[0].answers[question]

    def __repr__(self) -> str:
        asked = ", ".join(f"{QUESTIONS[name]} {found.size}" for name, found in self.rows[0].answers.items())
        return f"Fit({self.run.model.name} on {self.run.cluster.device}: {asked})"


def what_fits(
    run: Run,
    machine: Machine | None,
    *,
    backend: str,
    of: Sequence[str] = tuple(QUESTIONS),
    changes: bool = True,
    told: Told | None = None,
) -> Fit:
    """The answers to the questions of ``of`` (`QUESTIONS`) for a run, as it is and with changes that save memory.

    ``changes`` off leaves the latter out. ``told`` hears how many of how many answers are done. Raises InvalidInput for
    an unknown question and where the device's memory is not known.
    """
    unknown = [each for each in of if each not in QUESTIONS]
    if unknown or not of:
        rule = f"must be some of {', '.join(QUESTIONS)}"
        raise InvalidInput([Problem("of", each, rule, nearest_text(str(each), QUESTIONS)) for each in unknown or [""]])
    scale = scale_of(machine, backend=backend)
    tried = recipes(run)[: None if changes else 1]
    rows = []
    for at, recipe in enumerate(tried):
        answers = {}
        for place, question in enumerate(of):
            answers[question] = ask(question, recipe.run, scale)
            if told is not None:
                told(at * len(of) + place + 1, len(tried) * len(of))
        rows.append(Row(recipe.name, recipe.settings, answers))
    held = scale.held(run)
    family = family_of(run.model).rule if "model" in of else ""
    devices = tuple(_devices_for(run, held)) if "memory" in of else None
    return Fit(run, held, family, tuple(rows), devices)


def _devices_for(run: Run, held: Held) -> list[str]:
    """The devices of the catalog on which the run fits, each with what stands around the tensors there."""
    found = []
    for name in catalog.device_names():
        device = catalog.device(name)
        weighed = memory_of_device(run, held.peak_nbytes, device)
        if weighed.fits and weighed.usable_nbytes is not None:
            found.append((weighed.usable_nbytes, name))
    return [name for _, name in sorted(found)]


def to_json(fit: Fit, taken: Sequence[str] = ()) -> dict[str, Any]:
    """The answers as plain data; ``taken`` are the fields of the run that nobody said."""
    from trainledger.plan import in_json

    return {
        "run": in_json.run(fit.run, taken),
        "held": _held(fit.held),
        "family": fit.family,
        "devices_that_hold_it": None if fit.devices is None else list(fit.devices),
        "rows": [
            {
                "recipe": row.name,
                "set": list(row.settings),
                "answers": {name: _plain(fit.run, found) for name, found in row.answers.items()},
            }
            for row in fit.rows
        ],
    }


def _plain(run: Run, found: Found) -> dict[str, Any]:
    told: dict[str, Any] = {
        "question": QUESTIONS[found.question], "size": found.size, "note": found.note,
        "held": None if found.held is None else _held(found.held),
        "beyond_size": found.beyond_size, "beyond": None if found.beyond is None else _held(found.beyond),
    }  # fmt: skip
    if found.run is not None:
        told["model"] = model_facts(found.run)
    if found.question == "micro-batch" and found.size is not None:
        told["divides_the_global_batch"] = divides_batch(run, found.size)
    return told


def model_facts(run: Run) -> dict[str, Any]:
    """The shape of a run's model."""
    spec = run.model
    return {
        "parameters": parameters(spec).total, "d_model": spec.d_model, "n_layers": spec.n_layers,
        "n_heads": spec.n_heads, "n_kv_heads": spec.kv_heads, "d_ff": spec.d_ff,
    }  # fmt: skip


def _held(held: Held) -> dict[str, Any]:
    return {**vars(held), "fits": held.fits, "category": held.category, "rank": held.rank}


__all__ = ["Fit", "Row", "Scale", "model_facts", "to_json", "what_fits"]

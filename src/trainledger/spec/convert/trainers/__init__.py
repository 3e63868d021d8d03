"""Runs of programs that fine-tune models (axolotl, LLaMA-Factory), read from YAML files by a table of keys each."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any

from trainledger.spec.convert import foreign_program, offloaded
from trainledger.spec.durable import opened
from trainledger.spec.frozen import frozen
from trainledger.spec.optimizers import OPTIMIZERS
from trainledger.spec.problem import InvalidInput, Problem, nearest_text
from trainledger.spec.recipe import SCHEDULES
from trainledger.spec.units import MIB, ceil_div

_LARGEST = MIB  # bytes of a file
_DEEPEST = 4  # maps in one another
_UNSET = ("None", "False", "none", "false", "", "[]", "{}")  # values, as text, of keys that say nothing
_SLIP = 0.92  # likeness of two names of which one is a slip of the other
_STAGE_IN_NAME = re.compile(r"(?:zero|ds_z|z)_?-?([0-3])")


@frozen
class TrainerRun:
    """A run of a program: the sections of a run file without the model, the model's name, and sentences on the rest."""

    program: str
    model: str
    table: dict[str, dict[str, Any]]
    assumed: tuple[str, ...]
    remarks: tuple[str, ...]


@cache
def tables() -> dict[str, dict[str, Any]]:
    """The table of each program's keys, by the program's name."""
    files = sorted(Path(__file__).parent.glob("*.toml"))
    found = (tomllib.loads(file.read_text(encoding="utf-8")) for file in files)
    return {table["program"]: table for table in found}


def values_of(path: Path) -> dict[Any, Any] | None:
    """The map in a YAML file of a program with a table; None for any other file."""
    import yaml  # type: ignore[import-untyped]

    if path.suffix not in (".yaml", ".yml"):
        return None
    try:
        with opened(path) as file:
            content = file.read(_LARGEST + 1)
        found = yaml.safe_load(content) if len(content) <= _LARGEST else None
    except (OSError, yaml.YAMLError, RecursionError, ValueError):
        return None  # which the reader of any text refuses
    return found if isinstance(found, dict) and foreign_program(found) in tables() else None


def from_values(values: Mapping[Any, Any], *, devices: int | None = None, where: str = "") -> TrainerRun:
    """The run of a file on so many devices, None the fewest that it takes; raises `InvalidInput` with all problems.

    >>> file = {"base_model": "org/m", "sequence_len": 512, "micro_batch_size": 2, "bf16": True, "learning_rate": 1e-4}
    >>> run = from_values(file | {"gradient_accumulation_steps": 4}, devices=8)
    >>> run.model, run.table["recipe"]["global_batch"], run.table["recipe"]["precision"], run.table["layout"]
    ('org/m', 64, {'kind': 'bf16'}, {'replicate': 8})
    """
    program = foreign_program(values)
    assert program is not None
    read = _Reading(program, values, where)
    model = read.said.pop("run.model", None)
    if not isinstance(model, str):
        read.refuse(read.key_of("run.model"), model, "must name a model")
    layout, count, data_ranks = read.layout(devices)
    table = {
        "recipe": read.recipe(data_ranks, split=layout.get("tensor", 1) > 1),
        "layout": layout,
        "cluster": {"count": count},
    }
    if read.problems:
        raise InvalidInput(read.problems, where)
    meanings = (read.table["fields"].get(key, "") for key in read.supplied)
    assumed = [path for path in meanings if path.startswith("recipe.") and path.partition(".")[2] in table["recipe"]]
    assumed += ["recipe.steps"] * read.epochs + ["cluster.count"] * (devices is None)
    return TrainerRun(program, str(model), table, tuple(assumed), tuple(read.remarks()))


class _Reading:
    """Values being read: ``said`` are those with a meaning by its path, which sections are made of."""

    def __init__(self, program: str, values: Mapping[Any, Any], where: str) -> None:
        self.table, self.program, self.where = tables()[program], program, where
        self.said: dict[str, Any] = dict(self.table["always"])
        self.problems: list[Problem] = []
        self.notes: list[str] = []
        self.strangers: list[str] = []
        given = {key.replace(*self.table["alias"]): value for key, value in _flat(values)}
        self.supplied = {key: value for key, value in self.table["defaults"].items() if given.get(key) is None}
        silent = re.compile("|".join(self.table["silent"]))
        order = {key: place for place, key in enumerate(self.table["words"])}  # whatever that of the file is
        for key, value in sorted({**given, **self.supplied}.items(), key=lambda item: order.get(item[0], -1)):
            if not (self._read(key, value) or silent.fullmatch(key)):
                self._stranger(key, value)
        self.epochs = "recipe.steps" not in self.said

    def _read(self, key: str, value: Any) -> bool:
        """Take one key: a field of its own, words with a meaning, or what cannot be accounted for; False for others."""
        table = self.table
        if key in table["words"]:
            for word in value if isinstance(value, list) else [value]:
                self._word(key, word)
        elif str(value) in _UNSET:
            return True
        elif key in table["fields"]:
            self.said[table["fields"][key]] = value
        elif key in table["refused"]:
            self.refuse(key, value, table["refused"][key], f"{key}: false" if value is True else f"without {key}")
        elif key in table["assumed"]:
            self.notes.append(f"{key}: {table['assumed'][key]}")
        else:
            return False
        return True

    def _stranger(self, key: str, value: Any) -> None:
        """List a key that is not known; refuse a part of what is refused, and a slip of what changes the run."""
        whole = key.partition(".")[0]
        if whole in self.table["refused"]:
            if all(each.field != whole for each in self.problems):
                self.refuse(whole, value, self.table["refused"][whole], f"without {whole}")
            return
        known = [*self.table["fields"], *self.table["words"]]
        if close := get_close_matches(key, known, 1, _SLIP):
            self.refuse(key, value, f"is no key of {self.program} that is known", close[0])
        self.strangers.append(key)

    def _word(self, key: str, word: Any) -> None:
        known = self.table["words"][key]
        text = str(word).lower() if isinstance(word, bool) else str(word)
        if text not in known:
            if text not in _UNSET:
                self.refuse(key, word, "is not accounted for", nearest_text(text, known) or next(iter(known)))
            return
        meaning = dict(known[text])
        if note := meaning.pop("note", None):
            self.notes.append(f"{key} {text}: {note}")
        self.said |= meaning

    def refuse(self, key: str, value: Any, rule: str, nearest: Any = None) -> None:
        plain = value if isinstance(value, str | int | float) else str(value)
        self.problems.append(Problem(key, plain, rule, nearest))

    def key_of(self, meaning: str) -> str:
        """The program's key of a meaning."""
        return next((key for key, path in self.table["fields"].items() if path == meaning), meaning)

    def remarks(self) -> Iterator[str]:
        yield from self.notes
        if self.epochs:
            epochs = self.said.get("run.epochs")
            yield f"assuming one step: {epochs} epochs of data of a size that is not known (set recipe.steps or tokens)"
        if self.strangers:
            yield f"not understood: {', '.join(self.strangers)}"
        if self.supplied:
            yield f"defaults of {self.program}: " + ", ".join(f"{key} {value}" for key, value in self.supplied.items())

    def count(self, meaning: str) -> int:
        """A whole number of at least 1; 1 after a problem, or where nothing is said."""
        value = self.said.pop(meaning, 1)
        if type(value) is int and value > 0:
            return value
        self.refuse(self.key_of(meaning), value, "must be a whole number of at least 1", 1)
        return 1

    def group(self, name: str) -> dict[str, Any]:
        """What is said of a section or a part."""
        begin = f"{name}."
        return {path.removeprefix(begin): value for path, value in self.said.items() if path.startswith(begin)}

    def layout(self, devices: int | None) -> tuple[dict[str, Any], int, int]:
        """The ``[layout]``, the devices and the data ranks; data ranks replicate, or shard as DeepSpeed or FSDP does.

        Where nobody says how many devices there are, they are the fewest that the file's sizes take.
        """
        shards = "layout.shard" in self.said
        sizes = {axis: self.count(f"layout.{axis}") for axis in ("tensor", "context", "expert", "shard", "replicate")}
        shard, replicate = sizes.pop("shard"), sizes.pop("replicate")
        replica = sizes["tensor"] * sizes["context"]
        count = devices or replica * shard * replicate
        if count % (replica * shard * replicate):
            rule = f"must be a multiple of the {replica * shard * replicate} devices that the file's sizes take"
            self.refuse("cluster.count", count, rule, ceil_div(count, replica * shard * replicate) * replica * shard)
        data = max(1, count // replica)
        zero = self._zero_stage()
        self.sharded = zero is None and bool(shards or self.said.get("run.sharded"))
        section = {axis: size for axis, size in sizes.items() if size > 1}
        if zero or self.sharded:
            section |= {"shard": shard if shards else data, "zero": zero or 3}
            section |= {"replicate": data // section["shard"]} if data > section["shard"] else {}
            section |= {"reshard_after_forward": False} if self.said.get("run.reshard") is False and not zero else {}
        elif section.keys() & {"context", "expert"}:
            section |= {"shard": data, "zero": 0}
        else:
            section |= {"replicate": data}
        return ({} if count == 1 and "expert" not in section else section), count, data

    def _zero_stage(self) -> int | None:
        """The stage of a DeepSpeed file, read where it is found, else as its name says; None without DeepSpeed."""
        named = self.said.get("run.deepspeed")
        if named is None:
            return None
        key, config = self.key_of("run.deepspeed"), {}
        for folder in (Path(), Path(self.where).parent):
            if (path := folder / str(named)).is_file():
                try:
                    with opened(path) as file:
                        config = json.loads(file.read(_LARGEST))
                except (OSError, ValueError, RecursionError):
                    self.refuse(key, named, "is not a JSON file that can be read")
                    return 0
                break
        if not isinstance(config, dict):
            self.refuse(key, named, "must hold a map")
        elif config:
            if off := sorted(set(offloaded(config))):
                rule = f"offloads to host memory ({', '.join(off)}), which is not accounted for"
                self.refuse(key, named, rule, "a DeepSpeed file without it")
            zero = config.get("zero_optimization", {})
            stage = zero.get("stage", 0) if isinstance(zero, dict) else None
            if stage not in (0, 1, 2, 3):
                self.refuse(key, named, "must have zero_optimization.stage of 0 to 3")
            return stage if isinstance(stage, int) else 0
        name = Path(str(named)).name
        stage_named = _STAGE_IN_NAME.search(name)
        if stage_named is None or "offload" in name:
            self.refuse(
                key, named, "is no file here, and its name gives no ZeRO stage without offloading", "zero2.json"
            )
            return 0
        self.notes.append(f"{key} {name} is no file here: assuming ZeRO-{stage_named[1]} without offloading")
        return int(stage_named[1])

    def recipe(self, data_ranks: int, *, split: bool) -> dict[str, Any]:
        """The ``[recipe]``; a micro-batch is of a device, and data ranks and accumulation make the global batch."""
        accumulation, section = self.count("run.accumulation"), self.group("recipe")
        section["micro_batch"] = self.count("recipe.micro_batch")
        section["global_batch"] = section["micro_batch"] * accumulation * data_ranks
        if self.epochs:
            section["steps"] = 1
        adapter = self.said.get("run.adapter")
        section["precision"] = self._precision(adapter is not None)
        if adapter is not None:
            section["lora"] = self._lora(adapter)
        elif bits := self.said.get("run.bits"):
            self.refuse(f"weights in {bits} bits", bits, "need an adapter: quantized weights are not trained")
        optimizer = self.group("optimizer")
        of_kind = OPTIMIZERS[optimizer.setdefault("kind", "adamw")].__dataclass_fields__
        section["optimizer"] = {name: each for name, each in optimizer.items() if name in of_kind or name == "kind"}
        if split and section.pop("loss", "full") != "full":
            self.notes.append("tensor ranks: the loss is counted of all logits at once, an upper bound")
        if section.get("loss") == "fused" and section["precision"]["kind"].endswith("-sharded"):
            section["loss"] = "chunked"  # whose gradients may be scaled or gathered afterwards
            self.notes.append("a fused loss of sharded weights is counted as a chunked one")
        schedule = {"kind": "cosine"} | self.group("schedule")
        of_kind = SCHEDULES[schedule["kind"]].__dataclass_fields__
        schedule = {name: each for name, each in schedule.items() if name in of_kind or name == "kind"}
        if not self.epochs:
            warmup = self.said.get("run.warmup_steps") or self.said.get("run.warmup_ratio")
            if isinstance(warmup, float) and warmup < 1 and isinstance(section["steps"], int):
                warmup = round(warmup * section["steps"])
            schedule |= {"warmup_steps": warmup} if warmup else {}
        return section | {"schedule": schedule}

    def _precision(self, adapters: bool) -> dict[str, Any]:
        half = self.said.get("run.half")
        if half is None:
            return {"kind": "tf32" if self.said.get("run.tf32") else "fp32"}
        if adapters or (self.said.get("run.pure") and not self.sharded and "run.deepspeed" not in self.said):
            if adapters:
                self.notes.append(f"adapters are counted in {half} as the model is; PEFT keeps them in fp32")
            precision = {"kind": half}
            if half == "bf16" and self.said.get("run.moments") == "fp32":
                precision["moment_dtype"] = "fp32"
            return precision
        if "run.deepspeed" in self.said:
            return {"kind": half} | ({"master_weights": True} if half == "bf16" else {})
        return {"kind": "bf16-sharded" if self.sharded and half == "bf16" else f"{half}-mixed"}

    def _lora(self, adapter: str) -> dict[str, Any]:
        section, bits = self.group("lora"), self.said.get("run.bits")
        section.setdefault("alpha", 2 * section["rank"] if type(section.get("rank")) is int else 16)
        targets = section.get("targets")
        if isinstance(targets, str):
            targets = [
                "linear" if each.strip() in ("all", "all-linear") else each.strip() for each in targets.split(",")
            ]
        section["targets"] = ["linear"] if self.said.get("run.linear") or not targets else targets
        if bits not in (None, 4, 8):
            self.refuse(self.key_of("run.bits"), bits, "must be 4 or 8", 4)
        if bits or adapter == "qlora":
            section["base_format"] = "int8" if bits == 8 else "nf4"
        return section


def _flat(values: Mapping[Any, Any], before: str = "", depth: int = 0) -> Iterator[tuple[str, Any]]:
    """Keys and values, a map's keys with those of the maps around it before them."""
    for name, value in values.items():
        if isinstance(value, Mapping) and value and depth < _DEEPEST:
            yield from _flat(value, f"{before}{name}.", depth + 1)
        else:
            yield f"{before}{name}", value

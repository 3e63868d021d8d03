"""A model on disk, however it got there: a run, one of its checkpoints, a quantized one, an import, a Hugging Face
directory; to sample from, to export, or to start a run from."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from trainledger.engine.data.tokenizer import ByteTokenizer, Tokenizer, byte_level, json_tokenizer, read_tokenizer
from trainledger.engine.nn.huggingface import CONFIG, TOKENIZER, TokenizerText, import_model
from trainledger.engine.nn.init import initialize, take_weights
from trainledger.engine.nn.lora import merge
from trainledger.engine.nn.peft import export_adapters
from trainledger.engine.nn.transformer import Transformer
from trainledger.engine.nn.weights import (
    FILE,
    MODEL_FILE,
    faults,
    held,
    read_spec,
    read_weights,
    refuse,
    refuse_occupied,
    shapes,
    stored_in,
    whole_directory,
    write_spec,
    write_weights,
)
from trainledger.engine.train.checkpoint_contents import unlike
from trainledger.engine.train.optimizer import AVERAGE
from trainledger.engine.train.parallel.mesh import put
from trainledger.engine.train.precision import TORCH, build_model, hold_in
from trainledger.engine.train.quantized import (
    SOURCE_RUN,
    WRITTEN,
    Quantization,
    Source,
    is_quantized_checkpoint,
    quantize,
    read_quantized,
    write_quantized,
)
from trainledger.engine.train.run_directory import (
    MANIFEST,
    all_checkpoints,
    damage,
    is_checkpoint,
    latest_valid,
    model_files,
    read_facts,
)
from trainledger.engine.train.step import derive
from trainledger.spec.convert.huggingface import left_out, read_json
from trainledger.spec.durable import content_of, sha256, text_sha256
from trainledger.spec.model import ModelSpec
from trainledger.spec.parts import fields_of
from trainledger.spec.problem import InvalidInput, Problem
from trainledger.spec.recipe import Recipe
from trainledger.spec.run import Run
from trainledger.spec.runfile import read, to_toml

RUN_FILE = "run.toml"
IMPORTED = frozenset({MODEL_FILE, FILE, TOKENIZER})  # all that `write_start` writes
# What may be longer or named otherwise without being another function of the weights.
_FREE = {"name", "max_seq_len"}


@dataclass(frozen=True)
class Trained:
    """A model with its weights on the CPU, the tokenizer it was trained with if known, where both were found, and the
    run that trained it, if one here did."""

    model: Transformer
    tokenizer: Tokenizer | None
    weights: Path
    run: Run | None = None


def load_trained(path: Path, say: Callable[[str], None], *, averaged: bool = False) -> Trained:
    """The model in a run directory (its newest valid checkpoint), a checkpoint, a quantized checkpoint, an import or a
    Hugging Face directory.

    ``averaged``: with the moving average of its weights. ``say`` gets a sentence for each damaged checkpoint. Raises
    InvalidInput where there is no model, or no average.
    """
    if (paths := _run_and_checkpoint(path, say, averaged=averaged)) is not None:
        trained = _of_run(*paths, averaged=averaged)
        if trained.model.spec.scores:
            raise _refusal(path, "is a reward model: its scores are trained and watched, but no other verb reads them")
        return trained
    if averaged:
        raise _refusal(path, "is no run or checkpoint of one, so there is no average of its weights")
    if is_quantized_checkpoint(path):
        return _of_quantized(path)
    if (path / MODEL_FILE).is_file():
        return Trained(read_weights(read_spec(path), path / FILE), _tokenizer_in(path, None), path / FILE)
    if (path / CONFIG).is_file():
        return Trained(import_model(path), _tokenizer_in(path, None), path / FILE)
    what = f"is no run directory ({RUN_FILE}), checkpoint, import ({MODEL_FILE}) or Hugging Face directory ({CONFIG})"
    raise _refusal(path, what if path.is_dir() else "is not a directory; trainledger runs lists those of runs")


def find_weights(path: Path, say: Callable[[str], None]) -> tuple[ModelSpec, list[Path]]:
    """The spec and the weights' files of a model that training can start from: an import, a checkpoint or a run.

    ``say`` gets a sentence for each damaged checkpoint. Raises InvalidInput where there is no such model.
    """
    if (paths := _run_and_checkpoint(path, say)) is not None:
        return read(paths[0] / RUN_FILE).model, model_files(paths[1])
    if is_quantized_checkpoint(path):
        raise _refusal(path, "holds quantized weights; training starts from those that they were made of")
    if (path / MODEL_FILE).is_file():
        return read_spec(path), [path / FILE]
    if (path / CONFIG).is_file():
        raise _refusal(path, "is a Hugging Face directory; trainledger import makes of it what training can start from")
    what = f"is no import ({MODEL_FILE}), checkpoint or run directory ({RUN_FILE})"
    raise _refusal(path, what if path.is_dir() else "is not a directory")


# The SHA-256 is kept in state.json and in each checkpoint: a resume finds whether the file holds other weights by now.
def start_from(run: Run, model: Transformer, say: Callable[[str], None]) -> dict[str, str]:
    """Fill a model with the run's ``recipe.initial_weights`` and give their file (of several the manifest) and its
    SHA-256.

    Raises `InvalidInput` that names each tensor which does not fit. ``say`` gets a sentence for each setting
    of the weights that is not the run's and that no shape shows.
    """
    spec, files = _found(run, say)
    file = files[0] if len(files) == 1 else files[0].with_name(MANIFEST)
    if not file.is_file():
        rule = f"holds no {file.name}"
        raise InvalidInput([Problem("recipe.initial_weights", run.recipe.initial_weights, rule)])
    stored, wanted, tensors = stored_in(files), shapes(run.model), held(model)
    if run.model.scores and not spec.scores:  # which begin as those of a new run
        initialize(model, seed=derive(run.recipe.seed, "init"), put=put)
        for named in (stored, wanted, tensors):
            named.pop("lm_head.weight", None)
    refuse(faults(wanted, stored), f"recipe.initial_weights: {file} does not fit the run's model")
    if is_checkpoint(file.resolve().parent):
        say(f"{file}: weights alone; optimizer state is new, data from the first batch (--resume continues a run)")
    for other_setting in _other_settings(spec, run.model):
        say(f"{file}: {other_setting}")
    take_weights(model, tensors, lambda name: stored[name].read(), put)
    return {"file": str(file.resolve()), "sha256": sha256(file)}


def refuse_other_weights(run_dir: Path, begun_with: Mapping[str, str] | None) -> None:
    """Raise `InvalidInput` where the file of weights that a run began with holds others by now; it may be gone."""
    if begun_with is None or not Path(begun_with["file"]).is_file():
        return
    if sha256(Path(begun_with["file"])) != begun_with["sha256"]:
        rule = f"holds other weights than {run_dir} was begun with; put them back or give the new ones another name"
        raise InvalidInput([Problem("recipe.initial_weights", begun_with["file"], rule)])


def _found(run: Run, say: Callable[[str], None]) -> tuple[ModelSpec, list[Path]]:
    assert run.recipe.initial_weights is not None
    try:
        return find_weights(Path(run.recipe.initial_weights).expanduser(), say)
    except InvalidInput as error:
        raise InvalidInput(list(error.problems), "recipe.initial_weights") from error


def _other_settings(made_with: ModelSpec, used_with: ModelSpec) -> Iterator[str]:
    before, now = fields_of(made_with), fields_of(used_with)
    for path in dict.fromkeys([*before, *now]):
        if before.get(path) != now.get(path) and path not in _FREE:
            yield f"made with model.{path} = {before.get(path)}, goes on with {now.get(path)}"


def write_start(model: Transformer, directory: Path, *, tokenizer_json: str | None = None, force: bool = False) -> None:
    """Write a model that training can start from: model.toml ([model] of a run file), model.safetensors under our
    names, and tokenizer.json if given. The directory appears whole or not at all."""
    with whole_directory(directory, force=force, ours=IMPORTED) as partial:
        write_spec(model.spec, partial)
        write_weights(model, partial / FILE)
        if tokenizer_json is not None:
            (partial / TOKENIZER).write_text(tokenizer_json, encoding="utf-8")


def tokenizer_text(tokenizer: Tokenizer) -> TokenizerText:
    """A tokenizer as a tokenizer.json that `tokenizers` and `transformers` read."""
    definition = byte_level(tokenizer) if isinstance(tokenizer, ByteTokenizer) else tokenizer.definition
    return TokenizerText(definition, tokenizer.end_id, tokenizer.decode([tokenizer.end_id]))


def tokenizer_json_in(directory: Path) -> str | None:
    """The text of a directory's tokenizer.json, or None where it has none."""
    path = directory / TOKENIZER
    if not path.is_file():
        return None
    try:
        return content_of(path)
    except (OSError, ValueError) as error:
        raise _refusal(path, f"cannot be read: {error}") from None


def config_notes(directory: Path) -> list[str]:
    """Sentences on what a Hugging Face directory's config.json says that its spec does not hold."""
    return left_out(read_json(directory / CONFIG), for_weights=True)


def _run_and_checkpoint(path: Path, say: Callable[[str], None], *, averaged: bool = False) -> tuple[Path, Path] | None:
    """A run directory and its newest valid checkpoint, or the run of a checkpoint and that; None for another path."""
    if (path / RUN_FILE).is_file():
        run = read(path / RUN_FILE)
        newest = latest_valid(path, say, lambda each: unlike(each, run, to_train=averaged))
        if newest is None:
            raise _refusal(path, "has no valid checkpoint" + ("" if all_checkpoints(path) else " yet"))
        return path, newest
    run_dir = path.resolve().parent.parent
    if not (is_checkpoint(path.resolve()) and (run_dir / RUN_FILE).is_file() and model_files(path)):
        return None
    if wrong := damage(path) or unlike(path, read(run_dir / RUN_FILE), to_train=averaged):
        raise _refusal(path, wrong)
    return run_dir, path


def _of_run(run_dir: Path, checkpoint: Path, *, averaged: bool) -> Trained:
    run, files = read(run_dir / RUN_FILE), model_files(checkpoint)
    averages = _averages(checkpoint) if averaged else {}
    if run.recipe.lora is not None:
        model = with_adapters_merged(run.model, run.recipe, files, averages)
    else:
        model = read_weights(run.model, *files)
        _take(averages, held(model))
    tokenizer, trained_with = _tokenizer(run, run_dir), read_facts(checkpoint).get("tokenizer")
    if trained_with not in (None, text_sha256(tokenizer.definition)):
        raise _refusal(run_dir / TOKENIZER, "is not the tokenizer that the run was trained with; put that one back")
    return Trained(model, tokenizer, files[0] if len(files) == 1 else checkpoint, run)


def _of_quantized(directory: Path) -> Trained:
    model, weights = read_quantized(directory)
    run = read(directory / SOURCE_RUN) if (directory / SOURCE_RUN).is_file() else None
    return Trained(model, _tokenizer_in(directory, None if run is None else run.data.end_token), weights, run)


def write_adapters(
    path: Path, directory: Path, say: Callable[[str], None], *, force: bool = False, model_type: str | None = None
) -> tuple[str, list[str]]:
    """Write the adapters of a run in a directory or of a checkpoint, of its newest valid one, as PEFT loads them.

    Gives the model type that they are for, and their names.
    """
    paths = _run_and_checkpoint(path, say)
    if paths is None or (run := read(paths[0] / RUN_FILE)).recipe.lora is None:
        raise _refusal(path, "is no run or checkpoint of one that trained adapters (recipe.lora)")
    stored = stored_in(model_files(paths[1]))
    trained = tuple(f"{module}." for module in run.recipe.lora.whole or ())
    adapters = {name: part for name, part in stored.items() if ".lora_" in name or name.startswith(trained)}
    return export_adapters(run, adapters, directory, force=force, model_type=model_type), list(adapters)


def _averages(checkpoint: Path) -> dict[str, Tensor]:
    """The averages of the weights that were trained, by name."""
    stored = stored_in(sorted(checkpoint.glob("optimizer*.safetensors")))
    means = {name.removeprefix(f"{AVERAGE}/"): part.read() for name, part in stored.items() if name.startswith(AVERAGE)}
    if not means:
        raise _refusal(checkpoint, "has no average of its weights: recipe.ema was absent when it was trained")
    return means


def _take(values: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> None:
    """Put values by name into tensors."""
    with torch.no_grad():
        for name, value in values.items():
            tensors[name].copy_(value)


def with_adapters_merged(
    spec: ModelSpec, recipe: Recipe, files: Sequence[Path], averages: Mapping[str, Tensor] | None = None
) -> Transformer:
    """The model of a run with adapters, in fp32 and without them: what they add is in the weights.

    ``averages`` come in the place of trained weights.
    """
    model = build_model(spec, replace(recipe, documents=None))  # each document is read by itself
    own = dict(model.named_parameters())
    with torch.no_grad():
        for name, value in stored_in(files).items():
            if name in own:
                own[name].copy_(value.read())
    _take(averages or {}, own)
    merge(model)
    hold_in(model, torch.float32)
    return model


def _tokenizer(run: Run, run_dir: Path) -> Tokenizer:
    """The tokenizer of a run: kept in its directory, else what its data section names."""
    kept = _tokenizer_in(run_dir, run.data.end_token)
    if kept is not None:
        return kept
    if run.data.tokenizer == "bytes":
        return ByteTokenizer()
    if run.data.tokenizer != "bpe":
        return read_tokenizer(run.data.tokenizer, run.data.end_token)
    from trainledger.engine.data.mixture import open_mixture

    return open_mixture(run.data, vocab_size=run.model.vocab_size, progress=True).tokenizer()


def _tokenizer_in(directory: Path, end_token: str | None) -> Tokenizer | None:
    """The tokenizer in a directory's tokenizer.json, if it has one."""
    definition = tokenizer_json_in(directory)
    if definition is None:
        return None
    if definition == ByteTokenizer().definition:
        return ByteTokenizer()
    return json_tokenizer(str(directory / TOKENIZER), definition, end_token)


def _refusal(path: Path, rule: str) -> InvalidInput:
    return InvalidInput([Problem("", None, rule, where=str(path))])


@dataclass(frozen=True)
class QuantizedBytes:
    """Bytes of a model's weights before (in fp32) and after, and how many matrices were quantized."""

    matrices: int
    before: int
    codes: int
    scales: int
    whole: int

    @property
    def after(self) -> int:
        return self.codes + self.scales + self.whole


def refuse_target(model: Path, directory: Path, *, force: bool) -> None:
    """Raise `InvalidInput` where a directory cannot be written, or the model is a quantized one already."""
    if is_quantized_checkpoint(model):
        rule = "holds quantized weights already; quantize the checkpoint that they were made of"
        raise InvalidInput([Problem("", None, rule, where=str(model))])
    refuse_occupied(directory.resolve(), force=force, ours=WRITTEN)


def write(
    trained: Trained, directory: Path, quantization: Quantization, dtype: str, *, force: bool = False
) -> QuantizedBytes:
    """Write the model as it is served with its linear layers quantized and the rest in ``dtype``.

    Raises ModuleNotFoundError where torchao is missing.
    """
    spec = trained.model.spec.served
    served = shapes(spec)
    weights = {name: tensor.detach().cpu() for name, tensor in held(trained.model).items() if name in served}
    quantized = quantize(weights, quantization)
    parameters = dict(trained.model.named_parameters())
    whole = {
        # What routers correct their scores with is no weight: it stays fp32, and the account counts it with buffers.
        name: weight.to(TORCH[dtype]) if name in parameters else weight
        for name, weight in weights.items()
        if name not in quantized
    }
    run, tokenizer = trained.run, trained.tokenizer
    source = Source(
        trained.weights,
        spec,
        None if run is None else to_toml(run),
        None if tokenizer is None else tokenizer.definition,
    )
    write_quantized(directory, source, quantized, whole, quantization, force=force)
    return QuantizedBytes(
        matrices=len(quantized),
        before=sum(weight.numel() * torch.float32.itemsize for name, weight in weights.items() if name in parameters),
        codes=sum(each.codes.nbytes for each in quantized.values()),
        scales=sum(each.scales.nbytes for each in quantized.values()),
        whole=sum(tensor.nbytes for name, tensor in whole.items() if name in parameters),
    )

"""Adapters as files of PEFT, which loads them onto a model of ``transformers``.

Shapes: E experts, R rank, I input width, O output width.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from trainledger.engine.nn.huggingface import SAME, as_modules, full_name, pieces, write_json
from trainledger.engine.nn.weights import Stored, shapes, whole_directory
from trainledger.spec.convert.huggingface import FAMILIES, to_config
from trainledger.spec.problem import InvalidInput, Problem
from trainledger.spec.run import Run

ADAPTER_FILES = frozenset({"adapter_model.safetensors", "adapter_config.json"})
_PARTS_OF_PEFT = {"lora_a": "lora_A.weight", "lora_b": "lora_B.weight", "lora_magnitude": "lora_magnitude_vector"}


def export_adapters(
    run: Run, adapters: Mapping[str, Stored], directory: Path, *, force: bool = False, model_type: str | None = None
) -> str:
    """Write adapters, and what was trained whole beside, as PEFT loads them onto a model of transformers: of this type.

    Raises `InvalidInput` where transformers has a matrix of another form in the place of an adapted layer.
    """
    spec, lora = run.model, run.recipe.lora
    assert lora is not None
    kind: str = to_config(spec.served, "float32", model_type)["model_type"]
    names = FAMILIES[kind].names.of(spec)
    names = as_modules(names) if lora.of_experts else names
    alike = {
        piece.ours[0]: full_name(piece.theirs[0], names)
        for piece in pieces(names, spec, shapes(spec))
        if piece.form is SAME and len(piece.ours) == 1
    }
    tensors: dict[str, Tensor] = {}
    layers, beside, stacks = set[str](), set[str](), set[str]()
    for name, stored in adapters.items():
        module, _, part = name.rpartition(".")
        stack = part[len("lora_a_") :] if ".experts." in name else ""
        if (weight := alike.get(f"{module}.{stack or 'weight'}")) is None:
            rule = f"are part of another matrix in {kind}; export without --adapters writes merged weights"
            raise InvalidInput([Problem("recipe.lora.targets", module.rpartition(".")[2], rule)])
        if stack:  # the stacks of a module are wrapped one in the other, in the order of its parameters
            inner, factor = "" if stack == "down_proj" else "base_layer.", stored.read()  # [E, R, I] or [E, O, R]
            theirs, flat = _PARTS_OF_PEFT[part[: len("lora_a")]], part.startswith("lora_a")
            factor = factor.flatten(0, 1) if flat else factor.permute(1, 2, 0).flatten(1)
            tensors[f"base_model.model.{weight.removesuffix(stack)}{inner}{theirs}"] = factor.contiguous()
            stacks.add(f"experts.{stack}")
            continue
        theirs = _PARTS_OF_PEFT.get(part, part)
        (layers if theirs != part else beside).add(weight.split(".")[-2])
        tensors[f"base_model.model.{weight.removesuffix('weight')}{theirs}"] = stored.read()
    config: dict[str, object] = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "r": lora.rank, "lora_alpha": lora.alpha, "bias": "none",
        "lora_dropout": lora.dropout, "target_modules": sorted(layers), "base_model_name_or_path": spec.name,
        "use_dora": lora.dora, "modules_to_save": sorted(beside) or None,
    } | ({"target_parameters": sorted(stacks), "lora_dropout": 0.0} if stacks else {})  # fmt: skip
    with whole_directory(directory, force=force, ours=ADAPTER_FILES) as partial:
        save_file(tensors, partial / "adapter_model.safetensors", metadata={"format": "pt"})
        write_json(partial / "adapter_config.json", config)
    return kind

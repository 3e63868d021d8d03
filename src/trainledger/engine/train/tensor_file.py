"""One safetensors file, written as a stream: no second copy of the tensors, hashed while it is written.

A file may hold parts of tensors. Its header then says where each part begins, as the safetensors format of
torch.distributed.checkpoint has it (``torch.distributed.checkpoint.hf_storage``), so that its reader puts parts
together for any layout. https://github.com/huggingface/safetensors describes the format itself.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trainledger.engine.nn.weights import OFFSETS

FORMATS = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip
_NAMES = {dtype: name for name, dtype in FORMATS.items()}
_ALIGNMENT = 8  # of the first tensor's bytes
_AT_ONCE = 64 * 2**20


def write(path: Path, tensors: Mapping[str, Tensor], offsets: Mapping[str, Sequence[int]]) -> tuple[int, str]:
    """Write CPU tensors and have them on the disk; the file's bytes and its SHA-256.

    ``offsets`` are where parts of tensors begin; tensors that are not named there are whole. Raises OSError.
    """
    # Wide formats first, so that each tensor is aligned; then by name, so that equal tensors make an equal file.
    tensors = dict(sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0])))
    header: dict[str, object] = {"__metadata__": _metadata(tensors, offsets)}
    at = 0
    for name, each in tensors.items():
        end = at + each.numel() * each.element_size()
        header[name] = {"dtype": _NAMES[each.dtype], "shape": list(each.shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    digest = hashlib.sha256()
    with path.open("wb") as file:
        for piece in (len(text).to_bytes(8, "little"), text):
            file.write(piece)
            digest.update(piece)
        for each in tensors.values():
            array: Any = each.detach().contiguous().flatten().view(torch.uint8).numpy()
            data = memoryview(array)
            for begin in range(0, len(data), _AT_ONCE):
                digest.update(data[begin : begin + _AT_ONCE])
                file.write(data[begin : begin + _AT_ONCE])
        file.flush()
        os.fsync(file.fileno())
        return file.tell(), digest.hexdigest()


def _metadata(tensors: Mapping[str, Tensor], offsets: Mapping[str, Sequence[int]]) -> dict[str, str]:
    whole = {name: [0] * each.dim() for name, each in tensors.items()}
    places = {name: {"saved_offsets": list(offsets.get(name, whole[name]))} for name in tensors}
    return {"format": "pt", OFFSETS: json.dumps(places)}

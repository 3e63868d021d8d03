"""Small files that programs of others read: tokens, text and tokenizers, made here.

Those that a library of a program writes itself are made in its own Python: ``python data.py nanochat FOLDER``.
"""

from __future__ import annotations

import json
import os
import random
import sys
from pathlib import Path

N_WORDS, N_TEXTS = 2000, 2000


def texts() -> list[str]:
    """Texts of words that nobody knows, always the same."""
    drawn = random.Random(0)
    words = ["".join(drawn.choices("abcdefghijklmnop", k=drawn.randint(2, 9))) for _ in range(N_WORDS)]
    return [" ".join(drawn.choices(words, k=drawn.randint(50, 600))) for _ in range(N_TEXTS)]


def for_nanogpt(folder: Path) -> None:
    """``data/small`` with the tokens that prepare.py of a dataset writes."""
    import numpy as np

    (folder / "data" / "small").mkdir(parents=True, exist_ok=True)
    for name in ("train", "val"):
        tokens = np.random.default_rng(0).integers(0, 50257, 400_000).astype(np.uint16)
        tokens.tofile(folder / "data" / "small" / f"{name}.bin")


def for_modded_nanogpt(folder: Path) -> None:
    """Tokens of documents of 400 as fineweb.py of its data writes them, in as many files as the script asks for."""
    import numpy as np

    made = folder / "data" / "fineweb10B"
    made.mkdir(parents=True, exist_ok=True)
    tokens = np.random.default_rng(0).integers(0, 50256, 3_000_000).astype(np.uint16)
    tokens[::400] = 50256  # where a document begins
    header = np.zeros(256, np.int32)
    header[:3] = 20240520, 1, len(tokens)
    (made / "tokens").write_bytes(header.tobytes() + tokens.tobytes())
    for name in ("train", "val"):
        for number in range(20):
            (made / f"fineweb_{name}_{number:06d}.bin").symlink_to(made / "tokens")


def for_torchtitan(folder: Path) -> None:
    """The text and the tokenizer that its configurations for debugging name, which its wheel does not have."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    made = folder / "tests" / "assets"
    for each in ("c4_test", "tokenizer"):
        (made / each).mkdir(parents=True, exist_ok=True)
    rows = [json.dumps({"text": each}) + "\n" for each in texts()]
    (made / "c4_test" / "data.json").write_text("".join(rows))
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(), decoders.ByteLevel()
    special = ["<|begin_of_text|>", "<|end_of_text|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=N_WORDS, special_tokens=special, initial_alphabet=alphabet)
    tokenizer.train_from_iterator(texts()[:200], trainer)
    tokenizer.save(str(made / "tokenizer" / "tokenizer.json"))
    about = {"bos_token": special[0], "eos_token": special[1], "tokenizer_class": "PreTrainedTokenizerFast"}
    (made / "tokenizer" / "tokenizer_config.json").write_text(json.dumps(about))


def for_nanochat(folder: Path) -> None:
    """Shards of text and a tokenizer with the bytes of each token, where NANOCHAT_BASE_DIR names the folder."""
    os.environ["NANOCHAT_BASE_DIR"] = str(folder)
    import pyarrow as pa
    import pyarrow.parquet as pq
    import torch
    from nanochat.dataset import DATA_DIR  # type: ignore[import-not-found]
    from nanochat.tokenizer import RustBPETokenizer  # type: ignore[import-not-found]

    os.makedirs(DATA_DIR, exist_ok=True)
    for shard in range(2):
        table = pa.table({"text": texts()})
        pq.write_table(table, os.path.join(DATA_DIR, f"shard_{shard:05d}.parquet"), row_group_size=128)
    tokenizer = RustBPETokenizer.train_from_iterator(iter(texts()[:200]), 1024)
    tokenizer.save(str(folder / "tokenizer"))
    special = {tokenizer.encode_special(each) for each in tokenizer.get_special_tokens()}
    sizes = [
        0 if each in special else len(tokenizer.decode_single_token_bytes(each))
        for each in range(tokenizer.get_vocab_size())
    ]
    torch.save(torch.tensor(sizes, dtype=torch.int32), folder / "tokenizer" / "token_bytes.pt")


if __name__ == "__main__":
    made = {
        "nanogpt": for_nanogpt, "modded-nanogpt": for_modded_nanogpt, "torchtitan": for_torchtitan,
        "nanochat": for_nanochat,
    }  # fmt: skip
    made[sys.argv[1]](Path(sys.argv[2]))

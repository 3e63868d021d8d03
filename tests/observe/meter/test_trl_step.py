"""TRL's own DPO step as a second witness: its FLOPs and its states beside those of the account."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from trainledger.ledger.step import account
from trainledger.spec.model import ModelSpec
from trainledger.spec.parts import from_fields
from trainledger.spec.recipe import Recipe
from trainledger.spec.run import Run

pytestmark = pytest.mark.process

trl = pytest.importorskip("trl", minversion="1.16")

SEQ_LEN, PAIRS, VOCAB, HIDDEN = 24, 2, 128, 32
SIZES = {
    "vocab_size": VOCAB, "d_model": HIDDEN, "n_layers": 2, "attention.n_heads": 4, "attention.n_kv_heads": 2,
    "feed_forward.d_ff": 80, "max_seq_len": 64,
}  # fmt: skip


def run_of(**fields: Any) -> Run:
    recipe = {"seq_len": SEQ_LEN, "global_batch": 2 * PAIRS, "steps": 1, "loss": "chunked", "loss.chunks": 4}
    return Run(
        model=from_fields(ModelSpec, SIZES), recipe=from_fields(Recipe, {**recipe, "objective": "dpo", **fields})
    )


def trainer_of(folder: Path, *, again: bool) -> Any:
    """A DPO trainer of the model of `run_of`, on pairs that fill a row."""
    from datasets import Dataset
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({chr(97 + n): n for n in range(26)} | {"pad": 26, "end": 27}, unk_token="pad"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    pairs = [{"prompt": "a b c d e f g h", "chosen": " i j k l m n o p q r s t u v w",
              "rejected": " w v u t s r q p o n m l k j i"}] * 8  # fmt: skip
    sizes = LlamaConfig(
        vocab_size=VOCAB, hidden_size=HIDDEN, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=80, max_position_embeddings=64, tie_word_embeddings=False,
    )  # fmt: skip
    settings = trl.DPOConfig(
        output_dir=str(folder), per_device_train_batch_size=PAIRS, max_steps=1, report_to=[], bf16=False, use_cpu=True,
        gradient_checkpointing=again, max_length=SEQ_LEN, pad_to_multiple_of=SEQ_LEN, disable_tqdm=True,
        save_strategy="no", optim="adamw_torch",
    )  # fmt: skip
    model = LlamaForCausalLM(sizes)
    return trl.DPOTrainer(
        model=model, ref_model=copy.deepcopy(model), args=settings, train_dataset=Dataset.from_list(pairs),
        processing_class=PreTrainedTokenizerFast(tokenizer_object=words, eos_token="end", pad_token="pad"),
    )  # fmt: skip


def matmul_in_place(total: Sequence[int], left: Sequence[int], right: Sequence[int], **_: Any) -> int:
    """The FLOPs of ``addmm_``, which torch's counter has not."""
    return 2 * left[0] * left[1] * right[1]


@pytest.mark.parametrize("again", [False, True], ids=["kept", "recomputed"])
def test_a_step_of_trl_has_the_flops_and_states_of_the_account(tmp_path: Path, again: bool) -> None:
    trainer = trainer_of(tmp_path, again=again)
    batch = next(iter(trainer.get_train_dataloader()))
    assert batch["input_ids"].shape == (2 * PAIRS, SEQ_LEN)
    trainer.model.train()
    if again:  # which the trainer does as its loop begins
        trainer.model.gradient_checkpointing_enable({"use_reentrant": False})
    with FlopCounterMode(display=False, custom_mapping={torch.ops.aten.addmm_: matmul_in_place}) as counter:
        trainer.compute_loss(trainer.model, batch).backward()
    counted = {str(operator): flops for operator, flops in counter.get_flop_counts()["Global"].items()}
    ours = account(run_of(activation_checkpointing="full" if again else "none"))
    matmuls = sum(entry.flops * entry.times for entry in ours if entry.kind == "matmul")
    # TRL takes no logits of the last token of a row: of two forwards, a recomputation and two matmuls of backward.
    last = 5 * 2 * PAIRS * 2 * VOCAB * HIDDEN
    assert counted["aten.mm"] + counted["aten.addmm_"] == matmuls - last
    trainer.train()
    weights = sum(parameter.nbytes for model in (trainer.model, trainer.ref_model) for parameter in model.parameters())
    resident = dict(ours.resident)
    assert weights == resident["parameters"] + resident["frozen weights"]
    states = [state for states in trainer.optimizer.state.values() for state in states.values()]
    assert sum(state.nbytes for state in states) == resident["optimizer state"]

"""The meter in the real Trainers of transformers and of Lightning."""

import json

import pytest
import torch
from torch import nn

from trainledger.answers.pages.record import read_run

pytestmark = pytest.mark.process  # seconds each


class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        tokens_T = torch.arange(index, index + 32) % 100
        return {"input_ids": tokens_T, "labels": tokens_T}


def lines_of(folder):
    return [json.loads(each) for each in (folder / "metrics.jsonl").read_text().splitlines()]


def check_steps(record, count, tokens):
    steps = record.steps
    assert [each["step"] for each in steps] == list(range(1, count + 1))
    for each in steps:
        assert sum(each["phase_seconds"].values()) == pytest.approx(each["seconds"], rel=1e-9)
        assert {"forward", "backward", "optimizer"} <= each["phase_seconds"].keys()
        assert each["learning_rate"] >= 0
    assert steps[-1]["tokens"] == count * tokens
    assert record.state["state"] == "finished"
    assert record.measured.step_seconds is not None


def test_the_trainer_of_transformers(tmp_path):
    pytest.importorskip("accelerate")
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

    from trainledger.observe.meter.hugging_face import MeterCallback

    model = GPT2LMHeadModel(GPT2Config(vocab_size=100, n_embd=64, n_layer=2, n_head=2, n_positions=32))
    arguments = TrainingArguments(
        output_dir=str(tmp_path / "out"), per_device_train_batch_size=4, gradient_accumulation_steps=2, max_steps=12,
        logging_steps=1, save_steps=6, eval_strategy="steps", eval_steps=4, report_to=[], use_cpu=True,
        disable_tqdm=True,
    )  # fmt: skip
    callback = MeterCallback(tmp_path / "run")
    trainer = Trainer(
        model=model, args=arguments, train_dataset=Rows(), eval_dataset=Rows(), callbacks=[callback]
    )  # fmt: skip
    trainer.train()
    record = read_run(tmp_path / "run")
    check_steps(record, 12, tokens=4 * 2 * 32)
    assert all(isinstance(each["loss"], float) for each in record.steps)
    outside = [each for each in lines_of(tmp_path / "run") if each.get("event") == "outside"]
    assert sum("evaluation" in each["phase_seconds"] for each in outside) >= 2
    assert sum("checkpoint" in each["phase_seconds"] for each in outside) >= 1
    assert all(each["phase_seconds"]["data"] > 0 for each in record.steps[1:])


def test_the_trainer_of_lightning(tmp_path):
    lightning = pytest.importorskip("lightning.pytorch")
    from trainledger.observe.meter.lightning import MeterCallback

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = nn.Sequential(nn.Embedding(100, 64), nn.Linear(64, 100))

        def training_step(self, batch, index):
            logits_BTV = self.model(batch["input_ids"])
            return nn.functional.cross_entropy(logits_BTV.flatten(0, 1), batch["labels"].flatten())

        def validation_step(self, batch, index):
            self.log("validation_loss", self.training_step(batch, index))

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=1e-3)

    callback = MeterCallback(tmp_path / "run")
    trainer = lightning.Trainer(
        max_steps=10, accumulate_grad_batches=2, val_check_interval=8, accelerator="cpu", logger=False,
        enable_progress_bar=False, enable_model_summary=False, default_root_dir=tmp_path, callbacks=[callback],
        gradient_clip_val=1.0,
    )  # fmt: skip
    loader = torch.utils.data.DataLoader(Rows(), batch_size=4)
    trainer.fit(Module(), loader, loader)
    record = read_run(tmp_path / "run")
    check_steps(record, 10, tokens=4 * 2 * 32)
    assert all(isinstance(each["loss"], float) for each in record.steps)
    outside = [each for each in lines_of(tmp_path / "run") if each.get("event") == "outside"]
    assert any("evaluation" in each["phase_seconds"] for each in outside)

"""GPT-2 trained by the Trainer of transformers, with an evaluation and a checkpoint, as its examples do it."""

import tempfile

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed


class Tokens(torch.utils.data.Dataset):
    def __init__(self, rows: int) -> None:
        self.rows = torch.randint(0, 50257, (rows, 512))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, at: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.rows[at], "labels": self.rows[at]}


def main() -> None:
    set_seed(0)
    model = GPT2LMHeadModel(GPT2Config(n_layer=6))
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder, per_device_train_batch_size=4, gradient_accumulation_steps=2, max_steps=4, bf16=True,
            logging_steps=1, eval_strategy="steps", eval_steps=2, save_steps=2, report_to="none",
            dataloader_num_workers=2, optim="adamw_torch_fused",
        )  # fmt: skip
        Trainer(model=model, args=arguments, train_dataset=Tokens(512), eval_dataset=Tokens(16)).train()


if __name__ == "__main__":
    main()

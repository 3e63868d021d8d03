"""A transformer trained by Lightning's Trainer, which logs a loss and an accuracy of torchmetrics."""

import os

import lightning as L
import torch
import torch.nn.functional as F
import torchmetrics
from torch import nn


class Classifier(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10_000, 256)
        layer = nn.TransformerEncoderLayer(256, 8, 1024, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 4)
        self.head = nn.Linear(256, 20)
        self.accuracy = torchmetrics.classification.MulticlassAccuracy(20)

    def forward(self, ids_BT: torch.Tensor) -> torch.Tensor:
        return self.head(self.encoder(self.embedding(ids_BT)).mean(1))

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        ids_BT, labels_B = batch
        logits = self(ids_BT)
        loss = F.cross_entropy(logits, labels_B)
        self.accuracy(logits, labels_B)
        self.log("loss", loss, prog_bar=True)
        self.log("accuracy", self.accuracy, on_step=True, on_epoch=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def main() -> None:
    data = torch.utils.data.TensorDataset(torch.randint(0, 10_000, (256, 128)), torch.randint(0, 20, (256,)))
    loader = torch.utils.data.DataLoader(data, batch_size=8, shuffle=True, num_workers=2, pin_memory=True)
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    trainer = L.Trainer(
        max_steps=4, precision="bf16-mixed", logger=False, enable_checkpointing=False, log_every_n_steps=1,
        accelerator="auto", devices=min(ranks, 8), num_nodes=max(1, ranks // 8),
        strategy="ddp" if ranks > 1 else "auto",
    )  # fmt: skip
    trainer.fit(Classifier(), loader)


if __name__ == "__main__":
    main()

"""A loop on Hugging Face accelerate with a moving average of the weights, as diffusion models are trained."""

import copy

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import nn


class Denoiser(nn.Module):
    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.time = nn.Sequential(nn.Linear(1, width), nn.SiLU(), nn.Linear(width, width))
        self.begin = nn.Conv2d(3, width, 3, padding=1)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.GroupNorm(8, width), nn.SiLU(), nn.Conv2d(width, width, 3, padding=1)) for _ in range(6)
        )
        self.end = nn.Conv2d(width, 3, 3, padding=1)

    def forward(self, x_BCHW: torch.Tensor, t_B: torch.Tensor) -> torch.Tensor:
        h_BDHW = self.begin(x_BCHW)
        t_BD = self.time(t_B[:, None])
        for block in self.blocks:
            h_BDHW = h_BDHW + block(h_BDHW + t_BD[:, :, None, None])
        return self.end(h_BDHW)


class Average:
    """The moving average of a model's weights."""

    def __init__(self, model: nn.Module, decay: float = 0.999) -> None:
        self.model, self.decay = copy.deepcopy(model).eval().requires_grad_(False), decay

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        for mine, theirs in zip(self.model.parameters(), model.parameters(), strict=True):
            mine.lerp_(theirs, 1 - self.decay)


def main() -> None:
    accelerator = Accelerator(mixed_precision="bf16", gradient_accumulation_steps=2)
    model = Denoiser()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    images = torch.utils.data.TensorDataset(torch.randn(256, 3, 32, 32))
    loader = torch.utils.data.DataLoader(images, batch_size=16, shuffle=True)
    average = Average(model)
    average.model.to(accelerator.device)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    steps = 0
    while steps < 4:
        for (x_BCHW,) in loader:
            with accelerator.accumulate(model):
                noise = torch.randn_like(x_BCHW)
                t_B = torch.rand(len(x_BCHW), device=x_BCHW.device)
                noisy = (1 - t_B)[:, None, None, None] * x_BCHW + t_B[:, None, None, None] * noise
                loss = F.mse_loss(model(noisy, t_B), noise - x_BCHW)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                average.update(accelerator.unwrap_model(model))
                steps += 1
                accelerator.print(
                    f"step {steps}: loss {loss.item():.4f}, {accelerator.gather(loss.detach()[None]).mean():.4f}"
                )
            if steps == 4:
                break


if __name__ == "__main__":
    main()

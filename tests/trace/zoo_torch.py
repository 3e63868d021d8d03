"""Models of images and sequences in plain torch: convolutions, recurrences, attention of other kinds."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from zoo import Setup, Specimen, adamw, tokens

V, D, B, T = 500, 128, 4, 64
"""Words, width, sequences and tokens of each."""


def cross_entropy(wanted: Tensor) -> Any:
    targets = wanted.clone()
    return lambda logits: F.cross_entropy(logits.flatten(0, -2), targets.flatten())


# Images


class Residual(nn.Module):
    def __init__(self, width: int, out: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(width, out, 3, stride, 1, bias=False), nn.BatchNorm2d(out), nn.ReLU(inplace=True),
            nn.Conv2d(out, out, 3, 1, 1, bias=False), nn.BatchNorm2d(out),
        )  # fmt: skip
        self.skip = nn.Sequential(nn.Conv2d(width, out, 1, stride, bias=False), nn.BatchNorm2d(out))

    def forward(self, x_BCHW: Tensor) -> Tensor:
        return F.relu(self.body(x_BCHW) + self.skip(x_BCHW), inplace=True)


def resnet() -> Setup:
    model = nn.Sequential(
        nn.Conv2d(3, 32, 7, 2, 3, bias=False), nn.BatchNorm2d(32), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1),
        Residual(32, 32, 1), Residual(32, 64, 2), Residual(64, 128, 2),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 10),
    )  # fmt: skip
    sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
    return Setup(model, sgd, torch.randn(8, 3, 64, 64), cross_entropy(tokens(10, 8)))


class Down(nn.Module):
    """A block of a diffusion network: group norm, SiLU and convolution, with the time added in the middle."""

    def __init__(self, width: int, out: int, time: int) -> None:
        super().__init__()
        self.norm, self.conv = nn.GroupNorm(8, width), nn.Conv2d(width, out, 3, padding=1)
        self.time = nn.Linear(time, out)
        self.again, self.last = nn.GroupNorm(8, out), nn.Conv2d(out, out, 3, padding=1)
        self.skip = nn.Conv2d(width, out, 1)

    def forward(self, x_BCHW: Tensor, t_BE: Tensor) -> Tensor:
        y = self.conv(F.silu(self.norm(x_BCHW))) + self.time(t_BE)[:, :, None, None]
        return self.last(F.dropout(F.silu(self.again(y)), 0.1, self.training)) + self.skip(x_BCHW)


class UNet(nn.Module):
    """Predicts the noise that it has put on images, as a diffusion model learns to."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.time = nn.Conv2d(3, 32, 3, padding=1), nn.Sequential(nn.Linear(32, 64), nn.SiLU())
        self.down, self.middle, self.up = Down(32, 64, 64), Down(64, 64, 64), Down(128, 32, 64)
        self.attention = nn.MultiheadAttention(64, 4, batch_first=True)
        self.larger = nn.ConvTranspose2d(64, 64, 4, 2, 1)
        self.last = nn.Conv2d(32, 3, 3, padding=1)

    def forward(self, image_BCHW: Tensor, step_B: Tensor) -> Tensor:
        noise_BCHW = torch.randn_like(image_BCHW)
        share_B111 = torch.cos(step_B.float() / 1000)[:, None, None, None]
        noisy_BCHW = share_B111 * image_BCHW + (1 - share_B111**2).sqrt() * noise_BCHW
        angles = step_B[:, None] * torch.exp(torch.arange(16) * -0.5)
        t_BE = self.time(torch.cat([angles.sin(), angles.cos()], -1))
        wide_BCHW = self.down(self.first(noisy_BCHW), t_BE)
        small_BCHW = self.middle(F.avg_pool2d(wide_BCHW, 2), t_BE)
        seen_BPC = small_BCHW.flatten(2).transpose(1, 2)
        small_BCHW = small_BCHW + self.attention(seen_BPC, seen_BPC, seen_BPC, need_weights=False)[0].transpose(
            1, 2
        ).view_as(small_BCHW)
        found_BCHW = self.last(self.up(torch.cat([self.larger(small_BCHW), wide_BCHW], 1), t_BE))
        return F.mse_loss(found_BCHW, noise_BCHW)


def unet() -> Setup:
    model = UNet()
    return Setup(model, adamw(model, foreach=True), (torch.randn(4, 3, 32, 32), torch.randint(0, 1000, (4,))))


class Autoencoder(nn.Module):
    """A variational autoencoder; its loss is its output."""

    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Sequential(
            nn.Conv2d(3, 32, 4, 2, 1), nn.LeakyReLU(0.2), nn.Conv2d(32, 64, 4, 2, 1), nn.LeakyReLU(0.2), nn.Flatten(),
            nn.Linear(64 * 64, 64),
        )  # fmt: skip
        self.decode = nn.Sequential(
            nn.Linear(32, 64 * 64), nn.Unflatten(1, (64, 8, 8)), nn.ELU(), nn.Upsample(scale_factor=2),
            nn.Conv2d(64, 32, 3, padding=1), nn.ELU(), nn.ConvTranspose2d(32, 3, 4, 2, 1), nn.Sigmoid(),
        )  # fmt: skip

    def forward(self, image_BCHW: Tensor) -> Tensor:
        mean, log_variance = self.encode(image_BCHW).chunk(2, -1)
        code = mean + torch.randn_like(mean) * torch.exp(0.5 * log_variance)
        divergence = -0.5 * torch.sum(1 + log_variance - mean**2 - log_variance.exp())
        return F.binary_cross_entropy(self.decode(code).float(), image_BCHW, reduction="sum") + divergence


def autoencoder() -> Setup:
    model = Autoencoder()
    return Setup(model, torch.optim.Adam(model.parameters()), torch.rand(16, 3, 32, 32))


class Spatial(nn.Module):
    """A spatial transformer: finds out how to turn the image, samples it so, and classifies."""

    def __init__(self) -> None:
        super().__init__()
        self.find = nn.Sequential(
            nn.Conv2d(1, 16, 7), nn.MaxPool2d(2), nn.Hardtanh(), nn.Flatten(), nn.Linear(16 * 13 * 13, 6)
        )
        self.classify = nn.Sequential(
            nn.Conv2d(1, 32, 5, groups=1), nn.PReLU(), nn.Conv2d(32, 64, 5, dilation=2, groups=4), nn.ReLU6(),
            nn.PixelShuffle(2), nn.Conv2d(16, 16, 3, 2, padding=1, padding_mode="reflect"), nn.Mish(),
            nn.AdaptiveMaxPool2d(4), nn.Flatten(), nn.Linear(256, 10),
        )  # fmt: skip

    def forward(self, image_B1HW: Tensor) -> Tensor:
        grid = F.affine_grid(self.find(image_B1HW).float().view(-1, 2, 3), list(image_B1HW.shape), align_corners=False)
        turned = F.grid_sample(image_B1HW, grid, align_corners=False)
        return self.classify(F.interpolate(turned, 40, mode="bilinear", align_corners=False))


def spatial() -> Setup:
    model = Spatial()
    return Setup(
        model, torch.optim.RMSprop(model.parameters()), torch.randn(16, 1, 32, 32), cross_entropy(tokens(10, 16))
    )


# Sequences


class Recurrent(nn.Module):
    """Words through an LSTM and a GRU, with the weights of the embedding in the head as well."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(V, D)
        self.lstm = nn.LSTM(D, D, num_layers=2, batch_first=True, dropout=0.1)
        self.gru = nn.GRU(D, D, batch_first=True)
        self.head = nn.Linear(D, V)
        self.head.weight = self.embed.weight

    def forward(self, ids_BT: Tensor) -> Tensor:
        seen_BTD, _ = self.lstm(self.embed(ids_BT))
        return self.head(self.gru(seen_BTD)[0])


def recurrent() -> Setup:
    model, ids = Recurrent(), tokens(V, B, T // 2)
    return Setup(model, torch.optim.Adagrad(model.parameters()), ids, cross_entropy(ids))


class Waves(nn.Module):
    """Dilated causal convolutions over sound, gated, with normalized weights."""

    def __init__(self) -> None:
        super().__init__()
        normed = nn.utils.parametrizations.weight_norm
        self.first = normed(nn.Conv1d(1, 32, 1))
        self.layers = nn.ModuleList(normed(nn.Conv1d(32, 64, 2, dilation=2**each)) for each in range(6))
        self.out = nn.ModuleList(nn.Conv1d(32, 32, 1) for _ in range(6))
        self.last = nn.Conv1d(32, 256, 1)

    def forward(self, sound_B1T: Tensor) -> Tensor:
        x, skipped = self.first(sound_B1T), 0
        for at, (layer, out) in enumerate(zip(self.layers, self.out, strict=True)):
            kept, gate = layer(F.pad(x, (2**at, 0))).chunk(2, 1)
            y = out(torch.tanh(kept) * torch.sigmoid(gate))
            x, skipped = x + y, skipped + y
        return self.last(F.relu(skipped)).transpose(1, 2)


def waves() -> Setup:
    model = Waves()
    return Setup(model, adamw(model, amsgrad=True), torch.randn(2, 1, 1024), cross_entropy(tokens(256, 2, 1024)))


class Translator(nn.Module):
    """torch's own encoder-decoder."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(V, D, padding_idx=0)
        self.body = nn.Transformer(D, 4, 2, 2, 3 * D, batch_first=True)
        self.head = nn.Linear(D, V)

    def forward(self, source_BS: Tensor, target_BT: Tensor) -> Tensor:
        mask_TT = nn.Transformer.generate_square_subsequent_mask(target_BT.shape[1])
        return self.head(self.body(self.embed(source_BS), self.embed(target_BT), tgt_mask=mask_TT))


def translator() -> Setup:
    model, ids = Translator(), tokens(V, B, T)
    return Setup(model, torch.optim.NAdam(model.parameters()), (tokens(V, B, T), ids), cross_entropy(ids))


class Fourier(nn.Module):
    """A long convolution by Fourier transforms, as state-space models are trained."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(V, D), nn.Linear(D, V)
        self.decay, self.rotation = nn.Parameter(torch.randn(D, 16)), nn.Parameter(torch.randn(D, 16))
        self.mix = nn.Parameter(torch.randn(D, 16, 2))
        self.out = nn.Linear(D, 2 * D)

    def forward(self, ids_BT: Tensor) -> Tensor:
        x_BTD = self.embed(ids_BT)
        T = x_BTD.shape[1]
        pole_DN = torch.complex(-self.decay.exp(), self.rotation)
        powers_DNT = torch.exp(pole_DN[:, :, None] * torch.arange(T))
        kernel_DT = torch.einsum("dn,dnt->dt", torch.view_as_complex(self.mix), powers_DNT).real
        with torch.autocast("cpu", enabled=False):
            spectrum = torch.fft.rfft(x_BTD.float(), 2 * T, dim=1) * torch.fft.rfft(kernel_DT, 2 * T).T
            y_BTD = torch.fft.irfft(spectrum, 2 * T, dim=1)[:, :T]
        return self.head(x_BTD + F.glu(self.out(F.gelu(y_BTD))))


def fourier() -> Setup:
    model, ids = Fourier(), tokens(V, B, T)
    return Setup(model, adamw(model), ids, cross_entropy(ids))


class Linear(nn.Module):
    """Attention without a softmax: sums of keys and values run along the sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(V, D), nn.Linear(D, V)
        self.qkv, self.out, self.norm = nn.Linear(D, 3 * D), nn.Linear(D, D), nn.RMSNorm(D)

    def forward(self, ids_BT: Tensor) -> Tensor:
        x_BTD = self.embed(ids_BT)
        q, k, v = (each.unflatten(-1, (4, -1)) for each in self.qkv(self.norm(x_BTD)).chunk(3, -1))
        q, k = F.elu(q) + 1, F.elu(k) + 1
        state_BTHKV = torch.einsum("bthk,bthv->bthkv", k, v).cumsum(1)
        mixed = torch.einsum("bthk,bthkv->bthv", q, state_BTHKV)
        weight = torch.einsum("bthk,bthk->bth", q, k.cumsum(1))
        return self.head(x_BTD + self.out((mixed / weight[..., None]).flatten(2)))


def linear_attention() -> Setup:
    model, ids = Linear(), tokens(V, B, T)
    return Setup(model, torch.optim.Adamax(model.parameters()), ids, cross_entropy(ids))


class Speech(nn.Module):
    """Sound to letters without an alignment."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.body = nn.Conv1d(40, D, 3, 2, 1), nn.GRU(D, D // 2, bidirectional=True, batch_first=True)
        self.head = nn.Linear(D, 32)

    def forward(self, sound_BCT: Tensor, letters_BU: Tensor) -> Tensor:
        x_BTD = F.gelu(self.conv(sound_BCT)).transpose(1, 2)
        scores_TBV = self.head(self.body(x_BTD)[0]).float().log_softmax(-1).transpose(0, 1)
        lengths = [(scores_TBV.shape[0],) * len(sound_BCT), (letters_BU.shape[1],) * len(sound_BCT)]
        return F.ctc_loss(scores_TBV, letters_BU, *lengths)


def speech() -> Setup:
    model = Speech()
    return Setup(model, adamw(model), (torch.randn(B, 40, 200), tokens(32, B, 12)))


SPECIMENS = (
    Specimen("resnet", "convolutions", resnet),
    Specimen("unet", "diffusion", unet),
    Specimen("variational autoencoder", "autoencoder", autoencoder),
    Specimen("spatial transformer", "convolutions", spatial),
    Specimen("lstm and gru", "recurrent", recurrent),
    Specimen("wavenet", "convolutions", waves),
    Specimen("nn.Transformer", "encoder-decoder", translator),
    Specimen("fourier state space", "state space", fourier),
    Specimen("linear attention", "linear attention", linear_attention),
)

# What a trace cannot follow to the end, or not in all its memory, and says so.
BEYOND = (Specimen("ctc", "speech", speech),)

"""A small GPT trainer as people write them for one GPU."""

import argparse
import io

import torch
import torch.nn as nn
import torch.nn.functional as F

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=4)
parser.add_argument("--layers", type=int, default=2)
args = parser.parse_args()

device = "cuda" if torch.cuda.is_available() else "cpu"
assert device == "cuda"
torch.backends.cuda.matmul.allow_tf32 = True
torch.set_float32_matmul_precision("high")
torch.cuda.manual_seed(1337)
print(torch.cuda.get_device_name(), torch.cuda.get_device_properties(0).total_memory, torch.cuda.device_count())


class Attention(nn.Module):
    def __init__(self, d, heads):
        super().__init__()
        self.qkv, self.out, self.heads = nn.Linear(d, 3 * d), nn.Linear(d, d), heads

    def forward(self, x):
        B, T, C = x.size()
        q, k, v = self.qkv(x).split(C, dim=2)
        q, k, v = (each.view(B, T, self.heads, C // self.heads).transpose(1, 2) for each in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).contiguous().view(B, T, C))


class Block(nn.Module):
    def __init__(self, d, heads):
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.attn = Attention(d, heads)
        self.mlp = nn.Sequential(nn.Linear(d, 4 * d), nn.GELU(), nn.Linear(4 * d, d), nn.Dropout(0.1))

    def forward(self, x):
        x = x + self.attn(self.ln1(x))
        return x + self.mlp(self.ln2(x))


class GPT(nn.Module):
    def __init__(self, V, d, layers, heads, T):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(V, d), nn.Embedding(T, d)
        self.blocks = nn.ModuleList(Block(d, heads) for _ in range(layers))
        self.head = nn.Linear(d, V, bias=False)
        self.wte.weight = self.head.weight

    def forward(self, ids, targets=None):
        pos = torch.arange(0, ids.size(1), dtype=torch.long, device=ids.device)
        x = self.wte(ids) + self.wpe(pos)
        for block in self.blocks:
            x = block(x)
        logits = self.head(x)
        loss = None if targets is None else F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1))
        return logits, loss


model = GPT(512, 64, args.layers, 4, 64)
model.to(device)
assert model.wte.weight is model.head.weight
assert next(model.parameters()).device.type == "cuda"
assert next(model.parameters()).is_cuda
model = torch.compile(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
scaler = torch.amp.GradScaler("cuda")
data = torch.randint(0, 512, (4096,))
start = torch.cuda.Event(enable_timing=True)


def batch():
    ix = torch.randint(len(data) - 65, (4,))
    x = torch.stack([data[i : i + 64] for i in ix])
    y = torch.stack([data[i + 1 : i + 65] for i in ix])
    return x.pin_memory().to(device, non_blocking=True), y.pin_memory().to(device, non_blocking=True)


for step in range(args.steps):
    x, y = batch()
    assert x.device.type == "cuda"
    assert y.is_cuda
    with torch.autocast(device_type="cuda", dtype=torch.float16):
        logits, loss = model(x, y)
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
    if step % 3 == 0:
        torch.cuda.synchronize()
        print(step, loss.item(), torch.cuda.max_memory_allocated())
with torch.no_grad():
    mask = torch.zeros(3, 3).cuda()
    print(logits.argmax(-1).cpu().shape)
torch.save(model.state_dict(), io.BytesIO())

"""torchtitan's Trainer on CPUs (gloo), metered by two added lines, and profiled by its own profiler every ten steps.

    python tools/programs/data.py torchtitan FOLDER; cd FOLDER
    torchrun --nproc-per-node 2 torchtitan_on_cpus.py 20

What it asks of a device and CPUs do not have is given here; attention is the fused one of torch, as flex attention has
no backward on CPUs.
"""

import sys
from types import SimpleNamespace

import torch
import torch._utils
from torch.distributed.fsdp import FSDPModule

torch._utils._get_available_device_type = lambda: "cpu"
torch.cpu.current_device = lambda: 0
torch.cpu.get_device_name = lambda device=None: "CPU"
torch.cpu.get_device_properties = lambda device=None: SimpleNamespace(total_memory=16 * 2**30, name="CPU")
torch.cpu.memory_stats = lambda device=None: {}
torch.cpu.empty_cache = torch.cpu.reset_peak_memory_stats = lambda *of: None

from torchtitan.models.common.attention import ScaledDotProductAttention  # noqa: E402
from torchtitan.models.llama3.config_registry import llama3_debugmodel  # noqa: E402

config = llama3_debugmodel()
for layer in config.model_spec.model.layers:
    layer.attention.inner_attention = ScaledDotProductAttention.Config()
config.training.local_batch_size, config.training.seq_len = 1, 128
config.training.steps, config.training.disable_cuda_graphs = int(sys.argv[1]), True
config.checkpoint.enable = config.validator.enable = False
config.profiler.enable_profiling = True
trainer = config.build()
for each in trainer.model_parts[0].modules():
    if isinstance(each, FSDPModule):
        each.set_force_sum_reduction_for_comms(True)  # gloo knows no scaled sum

import trainledger as tl  # noqa: E402

meter = tl.meter_loop(trainer.model_parts[0], trainer.optimizers, "runs/torchtitan", deep=4)
trainer.dataloader = meter.data(trainer.dataloader)

trainer.train()
trainer.close()
torch.distributed.destroy_process_group()

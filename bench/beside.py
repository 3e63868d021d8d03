"""What other tools say of one training step, each in a process of its own: run by bench/trace.py, prints JSON.

    python bench/beside.py TOOL LAYERS WIDTH TOKENS

The step: transformers' LlamaForCausalLM with labels, fp32, one sequence. A tool is asked in the way that its own
documentation shows, on a model with weights, but where it can do without them.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import resource
import time
from collections.abc import Callable
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

VOCAB = 32_000
Told = dict[str, float | str | None]


def config(layers: int, width: int, tokens: int) -> LlamaConfig:
    return LlamaConfig(
        hidden_size=width, intermediate_size=width * 7 // 2, num_hidden_layers=layers,
        num_attention_heads=width // 64, num_key_value_heads=max(1, width // 256), vocab_size=VOCAB,
        max_position_embeddings=tokens, use_cache=False,
    )  # fmt: skip


def ids(tokens: int) -> torch.Tensor:
    return torch.zeros(1, tokens, dtype=torch.int64)


def calflops(model: Any, tokens: int) -> Told:
    """It counts a multiply-add as two, and backward as twice the forward where it is asked to."""
    from calflops import calculate_flops

    options = {"kwargs": {"input_ids": ids(tokens)}, "print_results": False, "output_as_string": False}
    forward, _, parameters = calculate_flops(model, **options)
    step, _, _ = calculate_flops(model, include_backPropagation=True, **options)
    return {"parameters": parameters, "forward": forward, "step": step}


def fvcore(model: Any, tokens: int) -> Told:
    """It counts a multiply-add as one, so its number is doubled here."""
    from fvcore.nn import FlopCountAnalysis

    analysis = FlopCountAnalysis(model, ids(tokens)).unsupported_ops_warnings(False)
    total = analysis.total()
    skipped = ", ".join(f"{count} x {name}" for name, count in sorted(analysis.unsupported_ops().items()))
    return {"forward": 2 * total, "skipped": skipped}


def ptflops(model: Any, tokens: int) -> Told:
    """It counts multiply-adds."""
    from ptflops import get_model_complexity_info

    macs, parameters = get_model_complexity_info(
        model, (tokens,), input_constructor=lambda _: {"input_ids": ids(tokens)}, as_strings=False,
        print_per_layer_stat=False,
    )  # fmt: skip
    return {"parameters": parameters, "forward": None if macs is None else 2 * macs}


def torchinfo(model: Any, tokens: int) -> Told:
    """It counts multiply-adds of modules with weights, and the bytes of all modules' outputs, forward and backward."""
    from torchinfo import summary

    told = summary(model, input_data=ids(tokens), verbose=0)
    return {
        "parameters": told.total_params, "forward": 2 * told.total_mult_adds, "activations": told.total_output_bytes,
        "peak": told.total_output_bytes + told.total_param_bytes,
    }  # fmt: skip


def deepspeed(model: Any, tokens: int) -> Told:
    """Its profiler counts a forward; its estimator counts the bytes of parameters, gradients and optimizer states."""
    from deepspeed.profiling.flops_profiler import get_model_profile
    from deepspeed.runtime.zero.stage_1_and_2 import estimate_zero2_model_states_mem_needs

    flops, _, parameters = get_model_profile(
        model=model, kwargs={"input_ids": ids(tokens)}, print_profile=False, detailed=False, as_string=False
    )
    _, states = estimate_zero2_model_states_mem_needs(
        total_params=parameters, num_gpus_per_node=1, num_nodes=1, cpu_offload=False, additional_buffer_factor=1.0
    )
    return {"parameters": parameters, "forward": flops, "peak": states}


def flop_counter(model: Any, tokens: int) -> Told:
    """torch's own counter, on a real forward and backward."""
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as forward:
        loss = model(input_ids=ids(tokens), labels=ids(tokens)).loss
    with FlopCounterMode(display=False) as backward:
        loss.backward()
    first = forward.get_total_flops()
    return {"forward": first, "step": first + backward.get_total_flops()}


def mem_tracker(model: Any, tokens: int) -> Told:
    """torch's own tracker of memory, on fake tensors, of the second step."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.distributed._tools.mem_tracker import MemTracker

    layers, width = len(model.model.layers), model.config.hidden_size
    with FakeTensorMode():
        fake = LlamaForCausalLM(config(layers, width, tokens))
        optimizer = torch.optim.AdamW(fake.parameters(), foreach=False)

        def step() -> None:
            fake(input_ids=ids(tokens), labels=ids(tokens)).loss.backward()
            optimizer.step()
            optimizer.zero_grad()

        step()
        tracker = MemTracker()
        tracker.track_external(fake, optimizer)
        with tracker:
            step()
    peak = next(iter(tracker.get_tracker_snapshot("peak").values()))
    return {"peak": peak["Total"]}


def runtime_estimator(model: Any, tokens: int) -> Told:
    """torch's estimator of run time asks a CUDA device for its kernels' speed."""
    from torch.distributed._tools.runtime_estimator import RuntimeEstimator

    if not torch.cuda.is_available():
        return {"error": "it needs CUDA: without it the process is aborted"}
    with RuntimeEstimator()("operator-level-cost-model"):
        model(input_ids=ids(tokens)).logits.sum().backward()
    return {}


TOOLS: dict[str, Callable[[Any, int], Told]] = {
    each.__name__: each
    for each in (calflops, fvcore, ptflops, torchinfo, deepspeed, flop_counter, mem_tracker, runtime_estimator)
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tool", choices=TOOLS)
    for name in ("layers", "width", "tokens"):
        parser.add_argument(name, type=int)
    args = parser.parse_args()
    torch.set_num_threads(1)
    model = LlamaForCausalLM(config(args.layers, args.width, args.tokens))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start, told = time.process_time(), {}
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            told = TOOLS[args.tool](model, args.tokens)
    except Exception as error:
        told = {"error": f"{type(error).__name__}: {str(error).strip().splitlines()[0][:120] if str(error) else ''}"}
    told["seconds"] = time.process_time() - start
    told["more_nbytes"] = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    print(json.dumps(told))


if __name__ == "__main__":
    main()

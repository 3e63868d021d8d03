"""What programs bring themselves, followed on fake tensors: kernels, values on the host, code meant for a compiler.

None of the kernels is compiled, fetched or run: Triton's, CUDA's that are compiled from source, and those of a hub
(Hugging Face's ``kernels``). A launch makes no memory, so that the account of memory is whole; what a kernel computes
and moves is known to none but its author, who may say it: ``cost_rule("triton::NAME")``, ``cost_rule("cuda::NAME")``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.autograd.function import BackwardCFunction

from trainledger.ledger import rules
from trainledger.ledger.entry import Event
from trainledger.trace.fakes.rules import Counts
from trainledger.trace.fakes.stored import Note, converted, host_values, without_values
from trainledger.trace.fakes.values import numbers_shown
from trainledger.trace.operators.custom import CUSTOM, Operator
from trainledger.trace.patches import Args, Kwargs, all_replaced, around, replaced, replaced_in
from trainledger.trace.recorder.recorder import Recorder
from trainledger.trace.recorder.source_lines import Refused
from trainledger.trace.recorder.storages import tensors_in

Launched = Callable[[str, Args, Kwargs], object]
_HIDDEN = ("grid", "warmup", "num_warps", "num_stages", "num_ctas", "maxnreg")  # of the launch, not of the kernel


@contextmanager
def launches_followed(launched: Launched) -> Iterator[None]:
    """Inside, ``launched(name, arguments, keywords)`` hears of each launch with a fake tensor, which does not run."""

    def run(before: Callable[..., Any], kernel: Any, *args: Any, **kwargs: Any) -> Any:
        given = map(_tensor_of, (*args, *kwargs.values()))
        if not any(isinstance(each, FakeTensor) for each in given):
            return before(kernel, *args, **kwargs)
        options = {name: value for name, value in kwargs.items() if name not in _HIDDEN}
        launched(f"triton::{_name_of(kernel)}", tuple(map(_tensor_of, args)), options)
        return None

    compiled = lambda _: lambda source, name, *args, **kwargs: _Compiled(name, launched)  # noqa: E731
    with (
        replaced_in("triton.runtime.jit", lambda module: (module.JITFunction, "run", around(run))),
        replaced_in("triton.runtime.autotuner", lambda module: (module.Autotuner, "run", around(run))),
        all_replaced((torch.cuda, "_compile_kernel", compiled), (torch.cuda, "compile_kernel", compiled)),
    ):
        yield


def record_launch(recorder: Recorder, name: str, args: Args, kwargs: Mapping[str, Any]) -> Event:
    """The entry of a launch, of the FLOPs that its `cost_rule` gives; without one it counts as unknown."""
    tensors = tensors_in(list(args)) + tensors_in(dict(kwargs))
    recorder.appear(tensors, "read first")
    rule = CUSTOM.get(name)
    flops, model_flops = (0, 0) if rule is None else rule.counted(args, dict(kwargs), None)
    if rule is None:
        recorder.uncounted[name] = recorder.uncounted.get(name, 0) + 1
    kind, source = ("unknown", name) if rule is None else (rule.kind, rule.source)
    basis = recorder.sizes.of_records(map(recorder.storages.of, tensors))
    facts = {"flops": flops, "model_flops": model_flops, "read": 0}
    return recorder.add(name, [], kind=kind, source=source, basis=basis, **facts)


def _tensor_of(value: Any) -> Any:
    """The tensor that a Triton tensor descriptor is of; any other argument as it is."""
    base = getattr(value, "base", None) if type(value).__name__ == "TensorDescriptor" else None
    return base if isinstance(base, Tensor) else value


def _name_of(kernel: Any) -> str:
    while not hasattr(kernel, "__name__") and hasattr(kernel, "fn"):
        kernel = kernel.fn
    return getattr(kernel, "__name__", type(kernel).__name__)


class _Compiled:
    """A CUDA kernel of source code that was not compiled."""

    def __init__(self, name: str, launched: Launched) -> None:
        self._name, self._launched = name, launched

    def set_shared_memory_config(self, nbytes: int) -> None:
        pass

    def __call__(self, grid: Any = None, block: Any = None, args: Any = None, *more: Any, **options: Any) -> None:
        self._launched(f"cuda::{self._name}", tuple(args or ()), {})


# FlashAttention's own functions, as `get_kernel` of Hugging Face's ``kernels`` gives them. Shapes, what is saved for
# backward and FLOPs are known without the compiled kernels: those of every query with every key of the longest
# sequence, or of its window. How long sequences are that lie behind each other depends on values: an upper bound.
FORWARD, BACKWARD = "trainledger::flash_attention", "trainledger::flash_attention_backward"


@torch.library.custom_op(FORWARD, mutates_args=())
def _forward(q: Tensor, k: Tensor, v: Tensor, keys: int, causal: bool) -> tuple[Tensor, Tensor]:
    """Queries [..., T, H, D] with ``keys`` keys each, and the logarithms of their sums in fp32."""
    raise NotImplementedError("of fake tensors alone")


@_forward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, keys: int, causal: bool) -> tuple[Tensor, Tensor]:
    sums = q.new_empty((*q.shape[:-3], q.shape[-2], q.shape[-3]), dtype=torch.float32)
    return q.new_empty((*q.shape[:-1], v.shape[-1])), sums


@torch.library.custom_op(BACKWARD, mutates_args=())
def _backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, sums: Tensor, keys: int, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    raise NotImplementedError("of fake tensors alone")


@_backward.register_fake
def _(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, sums: Tensor, keys: int, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _saved(ctx: Any, inputs: Any, output: Any) -> None:
    q, k, v, ctx.keys, ctx.causal = inputs
    ctx.save_for_backward(q, k, v, *output)
    ctx.mark_non_differentiable(output[1])


def _gradients(ctx: Any, grad: Tensor, *others: Any) -> tuple[Any, ...]:
    return *_backward(grad, *ctx.saved_tensors, ctx.keys, ctx.causal), None, None


_forward.register_autograd(_gradients, setup_context=_saved)


def _sizes(q: Tensor, v: Tensor, keys: int) -> tuple[int, int, int, int, int, int]:
    queries, heads, width = q.shape[-3:]
    batch = q.numel() // max(1, queries * heads * width)
    return batch, heads, queries, keys, width, v.shape[-1]


def _shape(q: Tensor, v: Tensor, keys: int, causal: bool) -> tuple[int, ...]:
    batch, heads, *rest = _sizes(q, v, keys)
    return batch * heads, *rest, int(causal)


CUSTOM[FORWARD] = Operator(
    "flash_attention",
    "attention",
    lambda args, out: rules.attention_flops(*_sizes(args[0], args[2], args[3])),
    assumed=True,
    shape=lambda args: _shape(args[0], args[2], args[3], args[4]),
)
CUSTOM[BACKWARD] = Operator(
    "flash_attention_backward",
    "attention",
    lambda args, out: rules.attention_backward_flops(*_sizes(args[1], args[3], args[6])),
    model_flops=lambda args, out: rules.attention_backward_model_flops(*_sizes(args[1], args[3], args[6])),
    assumed=True,
    shape=lambda args: _shape(args[1], args[3], args[6], args[7]),
)


def flash_attn_func(
    q: Tensor, k: Tensor, v: Tensor, *args: Any, causal: bool = False, window_size: Any = (-1, -1), **options: Any
) -> Any:
    """FlashAttention of sequences of one length, [B, T, H, D]."""
    return _attended(q, k, v, k.shape[1], causal, window_size, options)


def flash_attn_varlen_func(
    q: Tensor, k: Tensor, v: Tensor, *args: Any, causal: bool = False, window_size: Any = (-1, -1), **options: Any
) -> Any:
    """FlashAttention of sequences that lie behind each other, [T, H, D]."""
    most = options.get("max_seqlen_k", args[3] if len(args) > 3 else None)  # after both cu_seqlens and max_seqlen_q
    longest = k.shape[0] if most is None else min(int(most), k.shape[0])
    return _attended(q, k, v, longest, causal, window_size, options)


def _attended(q: Tensor, k: Tensor, v: Tensor, keys: int, causal: bool, window: Any, options: Kwargs) -> Any:
    before, after = (-1 if each is None else int(each) for each in window)
    after = 0 if causal and after < 0 else after
    if before >= 0 and after >= 0:
        keys = min(keys, before + 1 + after)
    out, sums = _forward(q, k, v, keys, causal)
    return (out, sums) if options.get("return_attn_probs") or options.get("return_softmax_lse") else out


_KNOWN = {"flash_attn_func": flash_attn_func, "flash_attn_varlen_func": flash_attn_varlen_func}
_ATTENTION = "flash-att"  # of the repository: flash-attn3, flash-attention-3


class _Kernels:
    """A package of a hub: functions that are known, and for any other a function that says so when it is called."""

    def __init__(self, repository: str, note: Callable[[str], object], name: str = "") -> None:
        self._repository, self._note, self._name = repository, note, name

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name in _KNOWN and _ATTENTION in self._repository:
            self._note(
                f"{name} of {self._repository} is not fetched: its FLOPs are those of the longest sequence or window, "
                "an upper bound"
            )
            return _KNOWN[name]
        return _Kernels(self._repository, self._note, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise Refused(
            f"{self._name or 'a kernel'} of {self._repository} is compiled code that a hub gives for a GPU, and its "
            "results are not known; let the program take another implementation"
        )


@contextmanager
def program_followed(mode: FakeTensorMode, note: Note, launched: Launched, counts: Counts) -> Iterator[None]:
    """Inside, a whole program runs on fake tensors: ``launched`` hears of its kernels, ``note`` what is left out."""
    with (
        numbers_shown(),
        without_values(note),
        replaced(nn.Module, "_apply", converted),
        host_values(mode),
        launches_followed(launched),
        replaced_in("kernels", lambda hub: (hub, "get_kernel", lambda _: lambda name, *_, **__: _Kernels(name, note))),
        replaced(BackwardCFunction, "apply", around(partial(_short_gradients, note))),
        counts.followed(),
    ):
        yield


def _short_gradients(note: Note, before: Callable[..., Any], node: Any, *gradients: Any) -> Any:
    # Functions that are written for torch.compile return fewer gradients than they have inputs: Dynamo takes those left
    # out as None.
    found = before(node, *gradients)
    inputs = len(node.needs_input_grad)
    if not isinstance(found, tuple) or len(found) >= inputs:
        return found
    name = type(node).__name__.removesuffix("Backward")
    note(
        f"backward of {name} returns {len(found)} gradients of {inputs} inputs, which eager torch refuses; "
        "the others are taken as None, as the compiler takes them"
    )
    return (*found, *(None,) * (inputs - len(found)))

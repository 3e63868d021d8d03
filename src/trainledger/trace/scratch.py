"""What kernels of a CPU allocate beside their results while they run, which dispatch does not show.

x: [B, C, *spatial], w: [out, C / groups, *taps], as aten's convolutions take them. Bytes on top of the results, at the
kernel's own highest moment. Found by following the allocator's events of torch 2.13 with oneDNN 3 at one thread; more
threads take more where they add up partial sums. What is not here allocates nothing worth telling (under a few KiB).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from math import prod
from typing import Any

import torch
from torch import Tensor

Args = tuple[Any, ...]
Scratch = Callable[[Args, Any], int]

_ONEDNN = ("Mkldnn", "MkldnnTranspose", "MkldnnEmpty")


@cache
def _lanes() -> int:
    """Channels that oneDNN keeps together: as many fp32 numbers as a vector of this machine holds."""
    return 16 if "AVX512" in torch.backends.cpu.get_cpu_capability() else 8


def _padded(channels: int) -> int:
    return -(-channels // _lanes()) * _lanes()


def _nbytes(tensor: Tensor, channels: int) -> int:
    """Bytes of [B, C, *spatial] with another number of channels."""
    return tensor.numel() // max(1, tensor.shape[1]) * channels * tensor.element_size()


def _last(tensor: Tensor) -> bool:
    """Whether channels stand last in memory."""
    if tensor.dim() not in (4, 5) or tensor.is_contiguous():
        return False
    order = torch.channels_last if tensor.dim() == 4 else torch.channels_last_3d
    return tensor.is_contiguous(memory_format=order)


def _backend(x: Tensor, w: Tensor, settings: Args) -> str:
    """The library that torch takes for a convolution."""
    stride, padding, dilation, transposed, output_padding, groups = settings
    select = getattr(torch._C, "_select_conv_backend", None)
    if select is None:
        return "Mkldnn"
    try:
        chosen = select(x, w, None, stride, padding, dilation, transposed, output_padding, groups)
    except (RuntimeError, TypeError):
        return "Slow"
    name = str(chosen).rpartition(".")[2]
    # The bindings of some versions know no name for oneDNN's transposed convolution.
    return "MkldnnTranspose" if transposed and "?" in name else name


class _Blocked:
    """The copies that oneDNN works on, with channels in groups of a vector's length."""

    def __init__(self, x: Tensor, w: Tensor, y: Tensor, settings: Args) -> None:
        stride, _, _, self.transposed, _, groups = settings
        c_in, c_out = x.shape[1], y.shape[1]
        depthwise = groups > 1 and groups == c_in == c_out
        pad: Callable[[int], int] = _padded if groups == 1 or depthwise else int
        # With few channels the first convolution of a network reads the image as it is.
        self.flat = groups == 1 and c_in < _lanes() and not self.transposed
        self.depthwise = depthwise
        self.strided = any(each > 1 for each in stride)
        self.x = 0 if self.flat else _nbytes(x, pad(c_in))
        self.padded_x = _nbytes(x, c_in if self.strided else pad(c_in))
        self.y = _nbytes(y, pad(c_out))
        taps = prod(w.shape[2:]) * w.element_size()
        if depthwise:
            self.w = self.padded_w = pad(c_out) * taps
        elif groups > 1:
            self.w = self.padded_w = prod(w.shape[:2]) * taps
        else:
            self.w = pad(c_out) * (c_in if self.flat else pad(c_in)) * taps
            self.padded_w = pad(c_out) * pad(c_in) * taps
        # The gradient of half-precision weights is added up in fp32.
        self.sums = 4 * w.numel() if w.element_size() == 2 else 0


def _forward(args: Args, y: Tensor) -> int:
    x, w = args[0], args[1]
    if _backend(x, w, args[3:9]) not in _ONEDNN:
        return 0
    return _one_way(x, w, y, args[3:9])


def _one_way(x: Tensor, w: Tensor, y: Tensor, settings: Args) -> int:
    """Of a convolution: copies of image, weight and result, then the result beside its copy."""
    blocks = _Blocked(x, w, y, settings)
    if _last(x) or _last(w):
        return w.nbytes if blocks.depthwise else 2 * blocks.w
    dense = 0 if x.is_contiguous() else x.nbytes
    plain = 2 * y.nbytes if blocks.transposed and blocks.strided else y.nbytes
    return dense + max(blocks.x + blocks.w + blocks.y, blocks.y + plain) - y.nbytes


def _backward(args: Args, out: Any) -> int:
    g, x, w, settings, wanted = args[0], args[1], args[2], args[4:10], args[10]
    if _backend(x, w, settings) not in _ONEDNN:
        return 0
    blocks = _Blocked(x, w, g, settings)
    gx, gw = (x.nbytes if wanted[0] else 0), (w.nbytes if wanted[1] else 0)
    if _last(x) or _last(w):
        dense = 0 if _last(g) else g.nbytes
        if blocks.depthwise:
            columns = prod(w.shape[1:]) * g.numel() * g.element_size()
            return dense + (columns + 2 * w.nbytes if gw else w.nbytes)
        return dense + max(2 * blocks.w, 3 * blocks.w + blocks.sums if gw else 0)
    dense = 0 if g.is_contiguous() else g.nbytes
    highest = 0
    if wanted[0]:
        plain = 2 * gx if blocks.strided and not blocks.transposed else gx
        highest = max(blocks.y + blocks.padded_w + blocks.padded_x, blocks.padded_x + plain)
    if wanted[1]:
        copies = 0 if blocks.depthwise else blocks.y + blocks.x
        highest = max(highest, gx + copies + blocks.w + blocks.sums, gx + blocks.w + gw)
    return dense + max(0, highest - gx - gw)


def _dense(*places: int) -> Scratch:
    """Of a kernel that first copies what is not contiguous among some arguments."""

    def scratch(args: Args, out: Any) -> int:
        given = [args[each] for each in places if each < len(args)]
        return sum(each.nbytes for each in given if isinstance(each, Tensor) and not each.is_contiguous())

    return scratch


def _log_softmax(args: Args, out: Any) -> int:
    return 0 if args[0].is_contiguous() else int(args[0].nbytes)


SCRATCH: dict[str, Scratch] = {
    "aten::convolution": _forward,
    "aten::convolution_backward": _backward,
    "aten::native_layer_norm": _dense(0),
    "aten::native_layer_norm_backward": _dense(0, 1),
    "aten::native_batch_norm_backward": _dense(0, 1),
    "aten::native_group_norm_backward": _dense(0, 1),
    "aten::gelu_backward": _dense(0, 1),
    "aten::_log_softmax": _log_softmax,
    "aten::_log_softmax_backward_data": _dense(0, 1),
    "aten::upsample_bilinear2d_backward": _dense(0),
    "aten::upsample_nearest2d_backward": _dense(0),
}

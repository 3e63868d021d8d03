"""What kernels of a CPU allocate besides their results while they run, which dispatch does not show.

x: [B, C, *spatial], w: [out, C / groups, *taps], as aten's convolutions take them. Bytes on top of the results, at the
kernel's own peak. Found by following the allocator's events of torch 2.13 with oneDNN 3 at one thread; more
threads take more where they add up partial sums. What is not here allocates under a few KiB.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from math import prod
from typing import Any

import torch
from torch import Tensor

from trainledger.spec.units import round_up
from trainledger.trace.operators.custom import Count
from trainledger.trace.patches import Args

_ONEDNN = ("Mkldnn", "MkldnnTranspose", "MkldnnEmpty")


@cache
def _lanes() -> int:
    # Channels that oneDNN keeps together: as many fp32 numbers as a vector of this machine holds.
    return 16 if "AVX512" in torch.backends.cpu.get_cpu_capability() else 8


@cache
def _lacks_bf16() -> bool:
    # Whether oneDNN computes in bf16 here without instructions for it.
    return "AVX512" in torch.backends.cpu.get_cpu_capability() and not torch.cpu._is_avx512_bf16_supported()


def _padded(channels: int) -> int:
    return round_up(channels, _lanes())


def _nbytes(tensor: Tensor, channels: int) -> int:
    """Bytes of [B, C, *spatial] with another number of channels."""
    return tensor.numel() // max(1, tensor.shape[1]) * channels * tensor.element_size()


def _last(tensor: Tensor) -> bool:
    """Whether channels are the last dim in memory."""
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
    """The copies that oneDNN works on, with channels in groups of a vector's length.

    A transposed convolution is the backward of one from its results to its inputs, so ``image`` is what has the size of
    that one's image, ``map`` of its result.
    """

    def __init__(self, x: Tensor, w: Tensor, y: Tensor, settings: Args) -> None:
        stride, _, _, self.transposed, _, groups = settings
        image, result = (y, x) if self.transposed else (x, y)
        c_in, c_out = image.shape[1], result.shape[1]
        self.depthwise = groups > 1 and groups == c_in == c_out
        pad: Callable[[int], int] = _padded if groups == 1 or self.depthwise else int
        self.emulated = w.element_size() == 2 and _lacks_bf16()
        self.strided = any(each > 1 for each in stride) and not self.emulated
        # An image of few channels is read as it is, and its gradient has room for more unless it is strided.
        flat = groups == 1 and c_in < _lanes()
        self.image = 0 if flat else _nbytes(image, pad(c_in))
        self.image_gradient = _nbytes(image, c_in if self.strided else pad(c_in))
        self.map = _nbytes(result, pad(c_out))
        taps = prod(w.shape[2:]) * w.element_size()
        if self.depthwise:
            self.w = self.padded_w = pad(c_out) * taps
        elif groups > 1:
            self.w = self.padded_w = prod(w.shape[:2]) * taps
        else:
            self.w = pad(c_out) * (c_in if flat else pad(c_in)) * taps
            self.padded_w = pad(c_out) * pad(c_in) * taps
        # Gradients of half-precision weights are added up in fp32, of one image and result after the other, turned.
        turned = (x.nbytes + y.nbytes) // max(1, x.shape[0]) if prod(w.shape[2:]) > 1 else 0
        self.sums = 4 * w.numel() + turned if w.element_size() == 2 else 0
        # With channels last, weights of one channel each are treated as whole vectors of channels.
        self.spread = groups * _lanes() ** 2 * prod(w.shape[2:])

    def forward(self, result: int) -> int:
        # Image, weight and map at once, then the map and the result.
        return max(self.image + self.w + self.map, self.map + result)

    def back_to_image(self, result: int) -> int:
        # The same from the map to the image; a strided one is written twice.
        plain = 2 * result if self.strided else result
        return max(self.map + self.padded_w + self.image_gradient, self.image_gradient + plain)


def _forward(args: Args, y: Tensor) -> int:
    x, w = args[0], args[1]
    if _backend(x, w, args[3:9]) not in _ONEDNN:
        return 0
    blocks = _Blocked(x, w, y, args[3:9])
    if _last(x) or _last(w):
        return int(w.nbytes) if blocks.depthwise else 2 * blocks.w
    dense = 0 if x.is_contiguous() else x.nbytes
    whole = blocks.back_to_image(y.nbytes) if blocks.transposed else blocks.forward(y.nbytes)
    if blocks.transposed and blocks.emulated and args[2] is not None:  # the bias is added to sums in fp32
        whole = max(whole, 3 * blocks.image_gradient + blocks.map + blocks.padded_w)
    return int(dense + whole - y.nbytes)


def _backward(args: Args, out: Any) -> int:
    g: Tensor
    x: Tensor
    w: Tensor
    g, x, w, settings, wanted = args[0], args[1], args[2], args[4:10], args[10]
    if _backend(x, w, settings) not in _ONEDNN:
        return 0
    blocks = _Blocked(x, w, g, settings)
    gx, gw = (x.nbytes if wanted[0] else 0), (w.nbytes if wanted[1] else 0)
    if _last(x) or _last(w):
        dense = 0 if _last(g) else g.nbytes
        if blocks.depthwise:
            sums = 4 * blocks.spread if w.element_size() == 2 else 0
            return dense + (blocks.spread * w.element_size() + sums + w.nbytes if gw else w.nbytes)
        return dense + max(2 * blocks.w, 3 * blocks.w + blocks.sums if gw else 0)
    dense = 0 if g.is_contiguous() else g.nbytes
    highest = 0
    if wanted[0]:
        highest = blocks.forward(gx) if blocks.transposed else blocks.back_to_image(gx)
    if wanted[1]:
        copies = 0 if blocks.depthwise else blocks.map + blocks.image
        highest = max(highest, gx + copies + blocks.w + blocks.sums, gx + blocks.w + gw)
    return dense + max(0, highest - gx - gw)


def _dense(*places: int) -> Count:
    # Of a kernel that first copies what is not contiguous among some arguments.

    def scratch(args: Args, out: Any) -> int:
        given = [args[place] for place in places if place < len(args)]
        return sum(tensor.nbytes for tensor in given if isinstance(tensor, Tensor) and not tensor.is_contiguous())

    return scratch


def _batch_norm_backward(args: Args, out: Any) -> int:
    # A second gradient of the image where both lie alike; in half precision two where the image has channels last.
    g, x = args[0], args[1]
    alike = (_last(g), _last(x))
    if alike in ((True, True), (False, False)) and (_last(x) or (g.is_contiguous() and x.is_contiguous())):
        return int(x.nbytes)
    if (_last(x) and g.is_contiguous()) or (x.is_contiguous() and _last(g)):
        return 2 * int(x.nbytes) if _last(x) and x.element_size() == 2 else 0
    return _dense(0, 1)(args, out)


def _promoted(args: Args, out: Any) -> int:
    # Of elements in several formats: what is not in the common one is copied into it (ATen's TensorIterator).
    given = [argument for argument in args if isinstance(argument, Tensor)]
    if len({tensor.dtype for tensor in given}) < 2:
        return 0
    common = given[0].dtype
    for tensor in given[1:]:
        common = torch.promote_types(common, tensor.dtype)
    # A single number does not decide
    if any(tensor.dim() == 0 for tensor in given):
        common = torch.result_type(given[0], given[1])
    return sum(tensor.numel() * common.itemsize for tensor in given if tensor.dtype != common and tensor.dim())


def _recurrent(args: Args, out: Any) -> int:
    # Both weights in oneDNN's own order, and in fp32 the gates of all steps.
    x, from_input, from_state = args[:3]
    gates = x.numel() // x.shape[-1] * from_input.shape[0] * 4 if x.dtype == torch.float32 else 0
    return int(from_input.nbytes + from_state.nbytes + gates)


def _recurrent_backward(args: Args, out: Any) -> int:
    # Gradients of both weights in fp32, rows a cache line apart; the gates of all steps, or copies in bf16.
    x, from_input, from_state = args[:3]
    row = 4 * (from_input.shape[0] + _lanes())
    rows = from_input.shape[1] + from_state.shape[1]
    steps = x.numel() // x.shape[-1]
    if x.dtype == torch.float32:
        return int(row * (rows + steps))
    return int(row * rows + from_input.nbytes + from_state.nbytes + 2 * x.nbytes)


def sums_of_matmul(dtype: str, m: int, n: int, k: int) -> int:
    """The fp32 sums of a matmul of bf16 matrices on a CPU without instructions for them, one matrix after the other.

    4 m n bytes; small matmuls (up to 16 x 16 x 16) are not done by oneDNN.
    """
    return 4 * m * n if dtype == "bf16" and m * n * k > 16**3 and _lacks_bf16() else 0


def _sums(args: Args, out: Any) -> int:
    dtype = "bf16" if out.dtype == torch.bfloat16 else ""
    return sums_of_matmul(dtype, out.shape[-2], out.shape[-1], args[-1].shape[-2])


SCRATCH: dict[str, Count] = {
    **dict.fromkeys(("aten::mm", "aten::bmm", "aten::addmm", "aten::baddbmm"), _sums),
    "aten::im2col": lambda args, out: int(args[0].nbytes) + _dense(0)(args, out),
    "aten::col2im": _dense(0),
    # Which bag each entry belongs to.
    "aten::_embedding_bag_backward": lambda args, out: (int(args[1].numel()) + 1) * int(args[2].element_size()),
    "aten::mkldnn_rnn_layer": _recurrent,
    "aten::mkldnn_rnn_layer_backward": _recurrent_backward,
    "aten::convolution": _forward,
    "aten::convolution_backward": _backward,
    "aten::native_layer_norm": _dense(0),
    "aten::native_layer_norm_backward": _dense(0, 1),
    "aten::native_batch_norm_backward": _batch_norm_backward,
    "aten::native_group_norm_backward": _dense(0, 1),
    "aten::gelu_backward": _dense(0, 1),
    "aten::_log_softmax": _dense(0),
    "aten::_log_softmax_backward_data": _dense(0, 1),
    "aten::upsample_bilinear2d_backward": _dense(0),
    "aten::upsample_nearest2d_backward": _dense(0),
}
_PROMOTING = "add sub mul div eq ne lt le gt ge maximum minimum pow atan2 remainder fmod addcmul addcdiv"
SCRATCH |= {f"aten::{part}{suffix}": _promoted for part in _PROMOTING.split() for suffix in ("", "_")}

"""A device: its data sheet and the share of it that is reached, its kernels, its clock, the errors of predictions."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from trainledger.spec.cluster import Fabric
from trainledger.spec.frozen import frozen
from trainledger.spec.problem import InvalidInput, Problem

# A CPU's; CUDA's; before compute capability 8.0; where PyTorch takes cuDNN's attention before FlashAttention; an
# accelerator's that is not NVIDIA's.
KERNELS = ("cpu", "cuda", "sm70", "sm90", "sm100", "other")
_CUDNN_FIRST = {9: "sm90", 10: "sm100"}  # generations: Hopper, and Blackwell but for GeForce
_FUSED = {"cpu": (), "sm70": ("efficient",), "other": ("flash", "efficient")}


def kernels_of_capability(compute_capability: float | None) -> str:
    """The kernels of an accelerator, by its NVIDIA compute capability (None: it is another's).

    On 9.x and 10.x ``F.scaled_dot_product_attention`` takes cuDNN's kernel first where cuDNN is newer than 9.15, as in
    PyTorch's builds for CUDA 13 since torch 2.11 (check_prefer_cudnn_attention in
    aten/src/ATen/native/transformers/cuda/sdp_utils.cpp). Left out: TORCH_CUDNN_SDPA_DEPRIORITIZED and builds with an
    older cuDNN, whose kernels are ``cuda``'s.

    >>> [kernels_of_capability(each) for each in (7.5, 8.0, 9.0, 10.3, 12.0, None)]
    ['sm70', 'cuda', 'sm90', 'sm100', 'cuda', 'other']
    """
    if compute_capability is None:
        return "other"
    return "sm70" if compute_capability < 8 else _CUDNN_FIRST.get(int(compute_capability), "cuda")


def fused_attention(kernels: str, dtype: str = "fp16") -> tuple[str, ...]:
    """The values of ``recipe.attention`` that name a kernel which a device has.

    FlashAttention and cuDNN's need compute capability 8.0, as bf16 does in the memory-efficient kernel
    (check_flash_attention_hardware_support, check_cudnn_hardware_support and less_than_sm80_mem_efficient_dtypes in
    the same file), and cuDNN is NVIDIA's.
    """
    if (kernels, dtype) == ("sm70", "bf16"):
        return ()
    return _FUSED.get(kernels, ("flash", "efficient", "cudnn"))


def attention_run(attention: str, kernels: str, dtype: str, *, of_megatron: bool) -> str:
    """A recipe's attention as it runs: ``sdpa`` is unfused where a device before 8.0 has no kernel for it.

    Transformer Engine has none there (its dot_product_attention/utils.py).

    >>> [attention_run("sdpa", "sm70", dtype, of_megatron=False) for dtype in ("fp16", "bf16", "fp32")]
    ['sdpa', 'math', 'sdpa']
    """
    lacks = kernels == "sm70" and (of_megatron or not fused_attention(kernels, dtype))
    return "math" if attention == "sdpa" and lacks else attention


def cudnn_takes(kernels: str, dtype: str, head_dim: int, value_dim: int, *, deterministic: bool = False) -> bool:
    """Sdpa takes cuDNN's attention for a training: of 16 bits, in heads of steps of 8 that are not too wide.

    That is 256 on Hopper, and 128 on Blackwell, or 192 with values of 128. Masks, dropout and heads that queries share
    it has; the same bits each time it does not promise, so that a ``deterministic`` step takes another (the same file
    as above, check_cudnn_tensor_shapes and check_cudnn_deterministic of torch 2.11 to 2.13). Left out: a sequence of
    one token, which it does not take either.

    >>> cudnn_takes("sm90", "bf16", 256, 256), cudnn_takes("sm100", "bf16", 256, 256)
    (True, False)
    >>> cudnn_takes("sm100", "bf16", 192, 128), cudnn_takes("sm90", "fp16", 64, 64, deterministic=True)
    (True, False)
    """
    if kernels not in _CUDNN_FIRST.values() or dtype not in ("bf16", "fp16") or deterministic:
        return False
    if head_dim % 8 or value_dim % 8:
        return False
    widest = 256 if kernels == "sm90" else 128
    return max(head_dim, value_dim) <= widest or (head_dim, value_dim) == (192, 128)


SHARES = (
    "matmul_share", "float8_share", "attention_share", "attention_backward_share", "bandwidth_share", "network_share",
    "odd_share",
)  # fmt: skip

NOT_NEGATIVE = ("depth", "attention_length", "kernel_seconds", "launch_seconds", "contention_share", "straggler_share")


@frozen(kw_only=True)
class Efficiency:
    """The constants of a device that a data sheet does not give; `forecast.predict.kernel` uses them.

    ``matmul_share`` of the peak is reached inside a large matmul in 16 bits or tf32, ``float8_share`` of the fp8
    peak in one in fp8; ``depth`` is the inner size k that takes as long as the start and the end of an output tile.
    ``attention_share`` and ``attention_backward_share`` are those of fused attention on long sequences with head
    size 128, ``attention_length`` the number of keys at which half of them is reached.
    ``odd_share`` of a matmul's rate is left where the rows of a matrix have an odd number of elements, which takes
    kernels that load them one by one.
    ``bandwidth_share`` of the memory's rate is reached by elementwise kernels. ``kernel_seconds`` is the least time of
    a kernel on the device, ``launch_seconds`` the time to launch an operation. ``contention_share`` of an overlapped
    collective's time is lost by compute; ``straggler_share`` of a step is added for each doubling
    of the nodes, since all wait for the slowest. ``network_share`` of the network's rate in a benchmark of one
    collective is reached in a step, where ranks arrive at different times and all groups communicate together.
    """

    matmul_share: float
    float8_share: float
    depth: float
    attention_share: float
    attention_backward_share: float
    attention_length: float
    bandwidth_share: float
    kernel_seconds: float
    launch_seconds: float
    contention_share: float = 0.0
    straggler_share: float = 0.0
    network_share: float = 1.0
    # GPT-2 124M trained 25 % faster when its vocabulary went from 50,257 to 50,304 (A. Karpathy 2023, A100), with a
    # third of its FLOPs in the head.
    odd_share: float = 0.6
    source: str = ""
    date: str = ""

    def problems(self) -> Iterator[Problem]:
        for name in SHARES:
            share = getattr(self, name)
            if not 0 < share <= 1:
                yield Problem(name, share, "must be above 0 and at most 1")
        for name in NOT_NEGATIVE:
            if getattr(self, name) < 0:
                yield Problem(name, getattr(self, name), "must not be negative", 0.0)


SHARE = 0.8  # of the runs lie in an interval


@frozen(kw_only=True)
class StepClass:
    """Measured over predicted seconds of steps on at most so many devices: `SHARE` lie between ``low`` and ``high``.

    ``short`` steps are predicted below a second; ``experts`` says whether the models have them.
    """

    devices: int
    short: bool
    experts: bool
    low: float
    high: float


@frozen(kw_only=True)
class StepErrors:
    """How far predicted steps are off, for each class of steps, the ones on fewer devices first.

    ``basis`` says what is known of the device: ``own`` = steps on such devices are published and its constants fitted
    on them, ``other`` = its constants are those of another device or of single kernels, ``bound`` = its data sheet
    alone. ``rows`` of so many ``sources`` were predicted so, each by what was known without its own source.
    """

    basis: str
    rows: int
    sources: int
    classes: tuple[StepClass, ...]


@frozen(kw_only=True)
class PairErrors:
    """Of two runs' steps, the ratio that was measured over the ratio that was predicted.

    `SHARE` of the pairs are within ``ratio`` of 1, up or down. ``rows`` pairs of so many ``sources`` were compared.
    """

    ratio: float
    rows: int
    sources: int


@frozen(kw_only=True)
class MemoryErrors:
    """Of the logarithm of measured over predicted peaks on at most so many devices: Student's t.

    ``shift`` is its middle, ``spread`` its scale; ``adapters`` says whether the peaks are those of adapters on frozen
    weights, of which ``rows`` of so many ``sources`` are known.
    """

    devices: int
    adapters: bool
    shift: float
    spread: float
    degrees: int
    rows: int
    sources: int


@frozen(kw_only=True)
class Seen:
    """The range of published runs: kinds (`predict.interval.kinds_of`), most devices, longest sequences in tokens."""

    kinds: tuple[str, ...]
    most_devices: int
    longest: int


@frozen(kw_only=True)
class ErrorModel:
    """The errors that are expected of a run on a device; ``widening`` of those that are unlike all published ones.

    ``one_device`` are pairs of runs on the same device, ``two_devices`` on different ones; ``memory`` has classes of
    runs, those on fewer devices first.
    """

    step: StepErrors
    steps_seen: Seen
    one_device: PairErrors
    two_devices: PairErrors
    memory: tuple[MemoryErrors, ...]
    memory_seen: Seen
    widening: float


@frozen
class Device:
    """A device of the catalog, or this machine as its calibration describes it.

    Peaks are dense FLOP/s by dtype; what is unknown is absent, never zero and never another device's.
    ``memory_nbytes`` is the size by its data sheet, ``usable_nbytes`` the total that PyTorch reports, of
    which the CUDA context is a part (None: not known), as read in ``usable_source``. ``compute_capability`` is
    NVIDIA's generation number.
    ``link_bytes_per_second`` goes one way. ``unverified`` names the numbers that were not read in the source.
    ``basis`` is ``assumed`` for a data sheet and ``measured`` for a calibration. ``multiprocessors`` compute
    tiles of a matmul in parallel; ``matrix_unit`` is the width of a systolic array. ``efficiency`` is the share of the
    data sheet that the device reaches; None: not known, so that times are bounds. ``clock`` is the share of the clock
    under a power limit. ``overheads`` is its memory outside tensors, ``published`` what runs on such devices reported,
    ``errors`` what predictions of published runs were off by.
    """

    name: str
    title: str
    peak_flops_per_second: dict[str, float]
    memory_nbytes: int | None = None
    memory_bytes_per_second: float | None = None
    power_watts: float | None = None
    basis: str = "assumed"
    source: str = ""
    date: str = ""
    unverified: tuple[str, ...] = ()
    link: str = ""
    link_bytes_per_second: float | None = None
    note: str = ""
    usable_nbytes: int | None = None
    usable_source: str = ""
    compute_capability: float | None = None
    multiprocessors: int | None = None
    matrix_unit: int | None = None
    efficiency: Efficiency | None = None
    clock: float = 1.0
    overheads: tuple[Overhead, ...] = ()
    published: tuple[Published, ...] = ()
    fabric: Fabric | None = None
    errors: ErrorModel | None = None

    @property
    def capacity_nbytes(self) -> int | None:
        """Its usable memory, or that of its data sheet where nothing else is known."""
        return self.memory_nbytes if self.usable_nbytes is None else self.usable_nbytes

    def keeping_free(self, nbytes: int) -> Device:
        """The device without so many bytes of its memory."""
        sizes = self.memory_nbytes, self.usable_nbytes
        memory, usable = (None if size is None else size - nbytes for size in sizes)
        return replace(self, memory_nbytes=memory, usable_nbytes=usable)

    @property
    def step_fabric(self) -> Fabric | None:
        """The fabric with the network share of a step's collectives; its bound where the efficiency is not known."""
        if self.fabric is None:
            return None
        if self.efficiency is None:
            return self.fabric.bound
        return replace(self.fabric, network_share=self.efficiency.network_share)

    @property
    def contention_share(self) -> float:
        """The share of an overlapped collective's time that compute loses to it; 0 without a known efficiency."""
        return 0.0 if self.efficiency is None else self.efficiency.contention_share


@frozen
class Overhead:
    """Memory of a device outside tensors: bytes, or a share of the tensors' bytes."""

    name: str
    what: str
    source: str
    date: str
    nbytes: int = 0
    share: float = 0.0


@frozen
class Published:
    """A number published of other runs, used where the run file gives none."""

    name: str
    value: float
    what: str
    source: str
    date: str


UNCLOCKED = 150 / 700  # share of the rated power that does not depend on the clock: 150 of an H100's 700 W, assumed
LEAST = 0.3  # of the rated power: drivers allow no lower limits, and the rule is not valid there
CLOCKED = ("matmul_share", "float8_share", "attention_share", "attention_backward_share")


def clock_share(limit_watts: float, rated_watts: float) -> float:
    """The clock under a power limit over the clock at the rated power; assumed, not measured.

    >>> round(clock_share(500, 700), 2), round(clock_share(350, 400), 2), clock_share(400, 400)
    (0.86, 0.94, 1.0)
    """
    always = UNCLOCKED * rated_watts
    share: float = ((limit_watts - always) / (rated_watts - always)) ** (1 / 3)
    return share


def slowed(efficiency: Efficiency, clock: float) -> Efficiency:
    """The constants of a device at a share of its clock: matmuls and attention reach that share of their rates."""
    return replace(efficiency, **{name: getattr(efficiency, name) * clock for name in CLOCKED})


def limited(device: Device, limit_watts: float) -> Device:
    """The device under a power limit; raises InvalidInput where that is above the rated power or below 30 % of it.

    Without a calibration times remain those of the data sheet's peak, a bound with or without a limit.
    """
    field = "cluster.power_limit_watts"
    rated = device.power_watts
    if rated is None:
        raise InvalidInput(
            [Problem(field, limit_watts, f"needs the rated power of {device.title}, which is not known")]
        )
    if limit_watts > rated:
        raise InvalidInput([Problem(field, limit_watts, f"is above the {rated:g} W of {device.title}", rated)])
    if limit_watts < LEAST * rated:
        rule = f"is below 30 % of the {rated:g} W of {device.title}, where the clock is not known"
        raise InvalidInput([Problem(field, limit_watts, rule, LEAST * rated)])
    clock = clock_share(limit_watts, rated)
    return replace(
        device,
        power_watts=limit_watts,
        clock=device.clock * clock,
        efficiency=None if device.efficiency is None else slowed(device.efficiency, clock),
    )

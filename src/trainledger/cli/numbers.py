"""Verbs of numbers alone: the napkin, the catalog, number formats, tensors and einsums."""

from __future__ import annotations

from argparse import Namespace

import trainledger as tl
from trainledger import catalog as known
from trainledger.answers.einsum_times import devices_named, einsum_times
from trainledger.answers.pages import catalog as listing
from trainledger.answers.pages import einsum as of_einsum
from trainledger.answers.pages import formats as of_formats
from trainledger.answers.pages import tensors as report
from trainledger.cli.arguments import DONE, WRONG_INPUT, Outcome, flag, option, options, takes
from trainledger.forecast.plan.napkin import why_impossible
from trainledger.report.document import Answer, Document
from trainledger.spec.problem import InvalidInput, Problem
from trainledger.tensors.chain import chain, places, read_index, start_of
from trainledger.tensors.einops import is_pattern, read_sizes, rearranged
from trainledger.tensors.einsum import Tensor, read_shape, read_tensor
from trainledger.tensors.einsum import einsum as costs_of
from trainledger.tensors.number import formats_and_blocks, in_block, is_format, known_format, read_number


@takes(
    option("--params N", 'parameters, such as "70B"'),
    option("--tokens D", 'tokens, such as "15T"; "20x" is 20 per parameter'),
    option("--device", "a device of the catalog, or this-machine", required=True),
    option("--count", "how many devices"),
    option("--days", 'days, or a time such as "2w"'),
    option("--mfu", "share of the peak that is reached, such as 0.5 or 50%%"),
    option("--price", "money per device-hour, for the bill"),
    option("--dtype", "whose peak counts; bf16 where the device has it, else fp16"),
)
def napkin(args: Namespace) -> Answer | Outcome:
    """Days, FLOPs, device-hours and static bytes of a training run from rules of thumb.

    Give four of --params, --tokens, --count, --days and --mfu; the fifth is solved for. Exit code 2 where that needs
    more than the peak of the devices.
    """
    answer = tl.napkin(**options(args))
    problem = why_impossible(answer)
    return answer if problem is None else Outcome(answer, WRONG_INPUT, problem)


@takes(option("what", "models, devices, links, or the name of one of them (all)", nargs="?"))
def catalog(args: Namespace) -> Document:
    """List the models, devices and links that are known by name, each with its source."""
    what = vars(args).get("what")
    if what is None or what in listing.KINDS:
        return listing.of_kinds([what] if what else listing.KINDS)
    names = [*known.model_names(), *known.device_names(), *known.link_names()]
    return listing.of_one(known.known_as(what, names, "name"))


@takes(
    option("words VALUE", "a number such as 1e-8, a format such as fp8, or both", nargs="*"),
    option("--format NAME", "this format only, such as bf16 (all)"),
    option("--largest NUMBER", "the largest other magnitude in its block: what it becomes in formats in blocks"),
    intermixed=True,
)
def dtype(args: Namespace) -> Document:
    """A number in every floating-point format: what it becomes, its error, its bits, and the step to the next.

    Without a number, the table of formats: range, smallest values, spacing, bytes, and what each suits. A format in
    place of the number, or before it, shows that format only: fp16, fp8 (both of them), int (integers), mxfp4 (its
    elements, and with --largest what becomes of the number in a block).
    """
    words, only, largest = vars(args).get("words", []), vars(args).get("format"), vars(args).get("largest")
    given = [each for each in words if not is_format(each)]
    numbers = [read_number(each) for each in given]
    if len(numbers) > 1:
        raise InvalidInput([Problem("value", given[1], "is a second number; one is shown at a time", given[0])])
    number = numbers[0] if numbers else None
    if only is not None and not is_format(only):
        known_format(only, "--format", floating=True)
    named = [each for each in words if each not in given] + [only] * (only is not None)
    chosen, blocks = formats_and_blocks(named)
    if largest is None:
        return of_formats.formats(chosen, number, named)
    if number is None:
        raise InvalidInput([Problem("--largest", largest, "is of a block with a number in it; give the number too")])
    most = read_number(largest, "--largest")
    return of_formats.formats(chosen, number, named, [in_block(each, number, most, "--largest") for each in blocks])


@takes(
    option("tensor", 'a format and a shape, such as "float32[4,8]"'),
    option("operations OPERATION", 'such as transpose:0,1 or "view(32)"', nargs="*"),
    option("--at INDEX", "where the element of this index lies, such as 1,2"),
    flag("--draw", "draw the storage after each step, not only after the last"),
    intermixed=True,
)
def tensor(args: Namespace) -> Document | Outcome:
    """A tensor such as "float32[4,8]", and what operations such as transpose and "view(32)" make of it.

    Alone: bytes in every unit, strides, and what one operation on each element costs. With operations, as one would
    write them after the tensor in torch: shape, strides, offset and storage after each, which is a view, which copies
    how many bytes, which fails and what works in its place. transpose:0,1 is short for "transpose(0,1)", "[:,1]" picks
    a part; view and reshape alone flatten.
    """
    one, operations, at = read_tensor(args.tensor), vars(args).get("operations") or [], vars(args).get("at")
    if not operations and at is None and not args.draw:
        return report.tensor(one)
    chained = chain(one, operations)
    index = () if at is None else read_index(at)
    found = [] if at is None else places(chained, index)
    code = DONE if chained.failure is None else WRONG_INPUT
    return Outcome(report.chain(one, chained, index, found, draw=args.draw), code, chained.failure)


@takes(
    option("equation", 'such as "ij,jk->ik", or a pattern of einops such as "b (h d) -> b h d"'),
    option("shapes SHAPE", "of each operand, as 1024,512; or a size, as h=8", nargs="*"),
    option("--reduce HOW", "how dims that vanish become one number: mean, sum, max ..."),
    option("--dtype", "format of all tensors (fp32)", default="fp32"),
    option("--device", "devices of the catalog, commas between them, whose peaks bound the time"),
    intermixed=True,
)
def einsum(args: Namespace) -> Document:
    """An einsum such as "ij,jk->ik" 1024,512 512,256: FLOPs, bytes, the cheapest order, and what bounds it.

    With --device also the predicted time, and what tiles and waves cost; several devices are shown side by side.

    Indices are letters, or words with spaces as in einops: "batch seq d_model, d_model d_ff -> batch seq d_ff". A
    pattern of einops on one tensor, such as "b (h d) t -> b h t d" 2,64,10 h=8, is read too: what it rearranges,
    repeats or, with --reduce, reduces, and whether that is a view or a copy.
    """
    device, how = vars(args).get("device"), vars(args).get("reduce")
    words, sizes = read_sizes(vars(args).get("shapes") or [])
    shapes = [read_shape(each, f"shape {number}") for number, each in enumerate(words, start=1)]
    dtype = known_format(args.dtype, "--dtype")
    if not is_pattern(args.equation, shapes, sizes, how):
        one = costs_of(args.equation, shapes, dtype)
        return of_einsum.einsum(one, () if device is None else einsum_times(one, devices_named(device, "--device")))
    if device is not None:
        rule = "bounds the time of an einsum; a pattern on one tensor moves bytes and is not timed"
        raise InvalidInput([Problem("--device", device, rule)])
    if len(shapes) != 1:
        rule = f"is a pattern on one tensor, and {len(shapes)} shapes are given"
        raise InvalidInput([Problem("equation", args.equation, rule)])
    found = rearranged(start_of(Tensor(dtype, shapes[0])), args.equation, sizes, reduction=how or "")
    return report.pattern(found)

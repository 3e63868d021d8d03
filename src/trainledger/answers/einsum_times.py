"""How long an einsum takes on devices: its matmuls on the roofline of each, with their tiles and waves."""

from __future__ import annotations

from collections.abc import Iterable

from trainledger import catalog
from trainledger.forecast.predict.einsum_time import EinsumTime, Matmul, einsum_time
from trainledger.spec.device import Device
from trainledger.spec.dtypes import nbytes_in
from trainledger.spec.problem import InvalidInput, Problem
from trainledger.tensors.einsum import Einsum

MOST_DEVICES = 8


def einsum_times(one: Einsum, devices: Iterable[Device]) -> tuple[EinsumTime, ...]:
    """The time of an einsum in its cheapest order on each device: its bound, and what is predicted.

    >>> from trainledger.tensors.einsum import einsum
    >>> one = einsum("mk,kn->mn", [(4096, 4096), (4096, 4096)], "bf16")
    >>> [(each.device, each.bound) for each in einsum_times(one, devices_named("h100-sxm, b200"))]
    [('h100-sxm', 'compute'), ('b200', 'compute')]
    """
    matmuls = [
        Matmul(
            each.matmul,
            one.dtype,
            each.flops,
            nbytes_in(each.read_elements, one.dtype),
            nbytes_in(each.written_elements, one.dtype),
        )
        for each in one.steps
    ]
    return tuple(einsum_time(matmuls, each) for each in devices)


def devices_named(text: str, field: str = "device") -> tuple[Device, ...]:
    """The devices of the catalog in a text, commas between them; raises `InvalidInput`."""
    names = [each.strip() for each in text.split(",") if each.strip()]
    if len(names) > MOST_DEVICES:
        rule = f"names {len(names)} devices, and {MOST_DEVICES} are compared at most"
        raise InvalidInput([Problem(field, text, rule, ",".join(names[:MOST_DEVICES]))])
    return tuple(catalog.device(each, field) for each in names)

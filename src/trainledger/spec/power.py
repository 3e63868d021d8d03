"""The clock of a device under a power limit.

The power of multiprocessors grows with the third power of their clock, since voltage grows with the clock (Rabaey et
al. 2003, Digital Integrated Circuits, section 5.5: activity x capacitance x voltage^2 x frequency); that of memory,
links and leakage does not depend on the clock.
"""

from __future__ import annotations

from dataclasses import replace

from trainledger.spec.cluster import Device
from trainledger.spec.efficiency import Efficiency
from trainledger.spec.problem import InvalidInput, Problem

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

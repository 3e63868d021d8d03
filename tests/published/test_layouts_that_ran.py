"""NVIDIA's layouts that ran on H100: whether they fit by the account."""

import pytest
from throughput_nemo import nemo_cases

from trainledger import catalog
from trainledger.forecast.predict.device_memory import memory_of_device
from trainledger.ledger.memory.timeline import peak_nbytes
from trainledger.ledger.ranks import accounts

pytestmark = pytest.mark.published

# Not by the account, and why: losses of tensor ranks over 256,000 tokens are predicted at 16 bytes a logit, and the
# inputs that 8-bit matmuls keep in 16 bits; Nemotron 340B of 2024 has a predicted optimizer state of 35 GB.
ABOVE = {
    "N008": "Nemotron-8B, 24.07", "N010": "Nemotron-340B, 24.07", "N066": "Nemotron-340B, 24.09",
    "N071": "Nemotron-340B, 24.09", "N146": "Nemotron-15B, 25.02.01", "N154": "Nemotron-15B, 25.02.01",
    "N155": "Nemotron-15B, 25.02.01",
}  # fmt: skip


CASES = {case.name: case for case in nemo_cases()}


def test_what_is_known_is_of_these_rows() -> None:
    rows = {name: CASES[name].row for name in ABOVE}
    assert {name: f"{row['model']}, {row['container']}" for name, row in rows.items()} == ABOVE


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_what_ran_fits_but_for_what_is_known(name: str) -> None:
    run = CASES[name].run
    peak = max(peak_nbytes(each.ledger) for each in accounts(run, backend="cuda"))
    device = catalog.placed(catalog.device(run.cluster.device), run.cluster)
    assert memory_of_device(run, peak, device).fits == (name not in ABOVE)

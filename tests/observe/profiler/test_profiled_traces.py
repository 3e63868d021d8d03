"""The page of public traces is what is found in them today, and a 70B's collectives are those of our account."""

import csv
from pathlib import Path

import profiled_traces
from trainledger.answers.load import load
from trainledger.ledger.ranks import accounts
from trainledger.observe.profiler.kinds import collective_named, payload_nbytes
from trainledger.observe.profiler.recording import Message

TRACES = Path(__file__).parent / "traces"
STEPS = 2  # of the recorded stretch


def test_the_page_is_what_would_be_written_today():
    today = profiled_traces.page(profiled_traces.rows_of_today())
    assert profiled_traces.PAGE.read_text(encoding="utf-8") == today


def test_every_row_has_its_source_and_its_licence():
    for each in profiled_traces.rows_of_today():
        assert "(MIT)" in profiled_traces.SOURCES[each.name][1]


def sent() -> dict[tuple[str, int], float]:
    """What a rank of the 70B sent in a step: how often, by kind and bytes of the whole message."""
    found = {}
    with open(TRACES / "mi300_llama70b_fsdp8.csv", encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            message = Message(
                row["collective"], int(row["elements_in"]), int(row["elements_out"]), row["dtype"], int(row["ranks"])
            )
            found[collective_named(message.collective), payload_nbytes(message)] = int(row["count"]) / STEPS
    return found


def test_collectives_of_a_70b_are_those_of_our_account():
    """Shards in bf16 are gathered layer by layer and gradients reduced in fp32, over 8 devices."""
    run = load(
        "llama-3-70b",
        {
            "layout.shard": 8, "cluster.count": 8, "cluster.device": "mi300x", "recipe.precision": "bf16-sharded",
            "recipe.global_batch": 8, "recipe.micro_batch": 1, "recipe.seq_len": 4096, "recipe.steps": STEPS,
        },
    )  # fmt: skip
    (rank,) = accounts(run, backend="cuda")
    predicted: dict[tuple[str, int], float] = {}
    for each in rank.ledger:
        if each.kind == "collective" and each.phase != "clip":
            key = collective_named(each.name), each.payload
            predicted[key] = predicted.get(key, 0) + each.times
    measured = sent()
    scalars = {key for key in measured if key[0] == "all-reduce"}  # the loss and the norm of gradients, 4 bytes each
    assert scalars == {("all-reduce", 4)}
    layer, ends = 855_654_400, 2_101_354_496  # elements of one layer; of the embedding, the head and the last norm
    assert measured.keys() - scalars == predicted.keys() == {
        ("all-gather", 2 * layer), ("all-gather", 2 * ends),
        ("reduce-scatter", 4 * layer), ("reduce-scatter", 4 * ends),
    }  # fmt: skip
    more = {key: predicted[key] - measured[key] for key in predicted}
    # That program keeps its last layer after forward, as backward needs it at once; our engine gathers it again.
    assert more == dict.fromkeys(predicted, 0) | {("all-gather", 2 * layer): 1}

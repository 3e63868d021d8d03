"""How published runs are modelled, and why others are not."""

from __future__ import annotations

from collections.abc import Iterator

from fine_tuning_runs import LITGPT, QWEN, litgpt_case, qwen_case
from megatron_deepspeed import CHRONICLES, TR3M, megatron_case
from published_case import Case, Row, Source, ran_out
from torchtitan_runs import TITAN, TITAN_FP8, TITAN_PRECISIONS, titan_case

from trainledger import catalog
from trainledger.spec.cluster import Cluster
from trainledger.spec.layout import Layout
from trainledger.spec.model import ModelSpec
from trainledger.spec.parts import from_fields
from trainledger.spec.precision import BF16Sharded
from trainledger.spec.recipe import Recipe
from trainledger.spec.run import Run
from trainledger.spec.savings import Selective

SOURCES: tuple[Source, ...] = (CHRONICLES, TR3M, TITAN, TITAN_FP8, LITGPT, QWEN)
LEFT_OUT = (
    ("huggingface/peft:method_comparison", "the tokens of a batch are not stated: samples are padded to the longest of "
     "a batch, 768 at most"),
    ("huggingface/peft:README", "no sizes, no batch and no length"),
    ("huggingface/transformers:docs/source/en/model_memory_anatomy", "an encoder (BERT) in fp32"),
    ("autoresearch", "the model has value embeddings and gated residuals, which the spec cannot say"),
    ("github.com/NVIDIA/Megatron-LM/issues/756", "experts, and neither sequence length nor parallelism is stated"),
)  # fmt: skip


# Rows of pretraining that are more than 20 % off.
_ONE_STAGE = (
    "not found: with one stage 4 to 5 GiB more than predicted, for any batch and tensor ranks; over two and "
    "more stages the same states are within 15 %"
)
ROW_REASONS = {
    "R0338": "the page has the same configuration with 44 GB in the row before",
    "R0390": _ONE_STAGE,
    "R0391": _ONE_STAGE,
    "R0405": _ONE_STAGE,
    "R0406": _ONE_STAGE,
}
# Runs that did not fit and were said to.
MISSED_REASONS = {
    "R0382": "not found: R0376 has as many parameters on as many devices and ran in 67 GB",
    "R0397": (
        "the prediction of the last stage is 30 GiB of 31.7; its loss is the largest part, and the allocator's "
        "fragmentation there is predicted as only 2.4 %"
    ),
    "R0783": "adapters of litgpt: see its assumptions",
}


def case_of(row: Row) -> Case | str:
    """A row as a run, or why it is left out."""
    source, family = row["source"], row["model_family"]
    if not row["measured_peak_mem_gib"] and not ran_out(row):
        return "no memory figure"
    if "bigscience" in source:
        return megatron_case(row)
    for beginning, why in LEFT_OUT:
        if beginning in source:
            return why
    if "torchtitan" in source:
        if row["precision"] in TITAN_PRECISIONS:
            return titan_case(row)
        return f"no recipe has {row['precision'].split()[0]} linear layers"
    if "litgpt" in source:
        if not row["n_layers"]:
            return "the sizes of the model are not stated"
        return "adapters are accounted for on one device only" if row["n_devices"] != "1" else litgpt_case(row)
    if "QwenLM" in source:
        if "(emb)" in family:
            return "trains embedding and head in addition to the adapters, which no recipe has"
        if row["n_devices"] != "1" and "Full" not in family:
            return "adapters are accounted for on one device only"
        return qwen_case(row)
    return "not predicted"


def labels_beside(rows: list[Row]) -> Iterator[Case]:
    """Runs that a row's notes say did not fit, beside the row's own run, and that run, which did."""
    row = next(each for each in rows if each["id"] == "R0051")
    labels = ("1", "", "R0051"), ("2", "OOM, by the notes of R0051", "R0051 with 2 sequences")
    for batch, notes, title in labels:
        model = from_fields(ModelSpec, catalog.model("llama-2-70b"))
        recipe = Recipe(
            seq_len=4096, micro_batch=int(batch), global_batch=64 * int(batch), steps=1, precision=BF16Sharded(),
            attention="flash", activation_checkpointing=Selective(),
        )  # fmt: skip
        cluster = Cluster(device="a100-sxm-80gb", count=64)
        run = Run(model=model, recipe=recipe, layout=Layout(shard=64), cluster=cluster)

        changed = {**row, "notes": notes, "micro_batch_per_device": batch}
        yield Case(changed, TITAN, run, catalog.device("a100-sxm-80gb"), title=title)

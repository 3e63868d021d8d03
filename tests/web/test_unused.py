"""Fields that do not count in a question: the answer says so with a reason, and they change nothing."""

import pytest

from trainledger.spec.problem import InvalidInput
from trainledger.web import answers
from trainledger.web.calculators import CALCULATORS
from trainledger.web.field import Field

QUESTIONS = [
    (name, query)
    for name, each in CALCULATORS.items()
    for query in ({}, *each.presets.values())
    if name not in ("layouts", "breaks")  # which take seconds
] + [("breaks", {"run": "gpt2", "recipe.seq_len": "512", "recipe.global_batch": "64", "along": "batch"})]


def others(field: Field) -> list[str]:
    """Two further texts of a field."""
    texts = [*field.stops[:1], *field.stops[-1:], *(value for value, _ in field.choices[:2])]
    return [each for each in texts if each not in ("", field.default)]


@pytest.mark.parametrize(("name", "query"), QUESTIONS, ids=str)
def test_what_does_not_count_changes_nothing(name: str, query: dict[str, str]) -> None:
    fields = {each.name: each for each in CALCULATORS[name].fields}
    seen = answers.view(name, query)
    unused = [each for each, said in seen["fields"].items() if said["unused"] and each not in query]
    for each in unused:
        for text in others(fields[each]):
            try:
                found = answers.view(name, query | {each: text})
            except InvalidInput:
                continue  # which a problem at the field says
            assert found["headlines"] == seen["headlines"], (each, text)
            assert found["verdict"] == seen["verdict"], (each, text)


def test_the_reasons_follow_the_question() -> None:
    def reason(name: str, field: str, **query: str) -> str:
        return str(answers.view(name, query)["fields"][field]["unused"])

    assert reason("optimal", "money") == "the budget is in days of devices"
    assert reason("optimal", "money", budget="money") == ""
    assert reason("optimal", "device", budget="flops") == "the budget is in FLOPs"
    assert reason("time", "run") == "the MFU is given"
    assert reason("time", "run", mfu_from="predicted") == ""
    assert reason("time", "dtype", mfu_from="predicted") == "the peak is that of the precision"
    assert reason("time", "days", mfu_from="predicted", solve="tokens") == ""
    assert reason("memory", "layout.zero") == "there is one shard rank"
    assert reason("matmul", "m", equation="ab,bc->ac", shapes="8,4 4,8") == "the einsum is asked about"
    assert reason("formats", "largest") == "choose a format with a block"
    assert reason("formats", "largest", format="mxfp4") == ""

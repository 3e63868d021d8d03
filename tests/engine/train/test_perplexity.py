"""The loss of documents: each by itself, whatever goes through the model with it, and cut into windows when long."""

import math
from collections.abc import Iterator

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tiny_run import TINY

from trainledger.engine.data.losses import Losses, TokenizedDocument, documents_of, held_out_documents
from trainledger.engine.data.prepare import prepare
from trainledger.engine.data.tokenizer import ByteTokenizer
from trainledger.engine.nn.init import initialize
from trainledger.engine.nn.transformer import Transformer
from trainledger.engine.train import evaluation
from trainledger.engine.train.evaluation import document_losses
from trainledger.spec.parts import with_fields
from trainledger.spec.run import DataSpec

END = 63


@pytest.fixture(scope="module")
def model():
    model = Transformer(TINY, dropout=0.5)
    initialize(model, seed=0)
    with torch.no_grad():
        model.lm_head.weight.mul_(4)  # so that the losses of tokens differ
    return model


def written(*lengths: int) -> list[TokenizedDocument]:
    drawn = np.random.default_rng(0)
    return [
        TokenizedDocument(f"document {at}", drawn.integers(0, 63, length), 2 * length)
        for at, length in enumerate(lengths)
    ]


def found(model, documents, context=16, stride=None) -> Losses:
    losses = document_losses(model, documents, end_id=END, context=context, stride=stride or context)
    return Losses(tuple(losses))


def each_token(model, ids: np.ndarray, first: int = 0) -> list[float]:
    """Losses of the tokens after each of ``ids``, of one window alone, from the target at ``first`` on."""
    with torch.no_grad():
        logits_1TV = model(torch.from_numpy(ids[None, :-1]))
        return F.cross_entropy(logits_1TV[0], torch.from_numpy(ids[1:]), reduction="none").tolist()[first:]


def test_a_document_is_read_after_an_end_token_and_its_own_is_predicted(model):
    model.eval()
    documents = written(5, 15, 1, 9)
    losses = found(model, documents)
    for each, document in zip(losses.documents, documents, strict=True):
        alone = each_token(model, np.array([END, *document.ids, END]))
        assert each.place == document.place
        assert each.tokens == len(alone) == len(document.ids) + 1
        assert each.nats == pytest.approx(sum(alone), rel=1e-6)


@pytest.mark.parametrize("stride", [16, 7, 1])
def test_windows_of_a_long_document_predict_every_token_once(model, stride):
    model.eval()
    (document,) = written(45)
    ids = np.array([END, *document.ids, END])
    expected = each_token(model, ids[:17])
    begin = 16
    while begin < len(ids) - 1:
        end = min(begin + stride, len(ids) - 1)
        start = max(0, end - 16)
        expected += each_token(model, ids[start : end + 1], begin - start)
        begin = end
    losses = found(model, [document], stride=stride)
    assert losses.tokens == len(expected) == 46
    assert losses.documents[0].nats == pytest.approx(sum(expected), rel=1e-6)


def test_what_goes_through_the_model_together_changes_nothing(model, monkeypatch):
    documents = written(*range(1, 60), 200, 3)
    together = found(model, documents)
    monkeypatch.setattr(evaluation, "LOGITS_NBYTES", 1)
    alone = found(model, documents)
    assert [each.place for each in together.documents] == [each.place for each in documents]
    for one, other in zip(together.documents, alone.documents, strict=True):
        assert one.nats == pytest.approx(other.nats, rel=1e-6)


def test_an_untrained_model_knows_that_there_are_so_many_tokens():
    model = Transformer(with_fields(TINY, {"vocab_size": 64}))
    with torch.no_grad():
        for each in model.parameters():
            each.zero_()
    losses = found(model, written(4, 30))
    assert losses.nats_per_token == pytest.approx(math.log(64))
    assert losses.perplexity == pytest.approx(64)
    assert losses.bits_per_byte == pytest.approx(6 * losses.tokens / losses.text_nbytes)
    assert losses.standard_error == pytest.approx(0, abs=1e-6)


def test_a_model_is_left_in_the_mode_in_which_it_was(model):
    model.train()
    found(model, written(3))
    assert model.training


@pytest.fixture
def corpus(tmp_path):
    texts = [f"Text number {at}, which is {'quite ' * at}long.\n" for at in range(40)]
    for at, text in enumerate(texts):
        (tmp_path / f"{at:02}.txt").write_text(text + "ü" * (at % 3))
    return tmp_path


def places(documents: Iterator[TokenizedDocument]) -> dict[bytes, TokenizedDocument]:
    return {bytes(each.ids.tolist()): each for each in documents}


def test_a_store_gives_the_documents_that_it_holds_out(corpus, tmp_path):
    data = DataSpec(path=(str(corpus / "*.txt"),), validation_fraction=0.3, cache=str(tmp_path / "cache"))
    store = prepare(data, vocab_size=None, progress=False)
    held_out = list(held_out_documents(store))
    assert [each.place for each in held_out] == [f"document {at}" for at in range(store.validation.documents)]
    assert sum(len(each.ids) + 1 for each in held_out) == store.validation.tokens
    assert sum(each.text_nbytes for each in held_out) == store.validation.text_nbytes
    read = places(documents_of([str(corpus / "*.txt")], ByteTokenizer(), "text", tmp_path / "cache"))
    assert len(read) == 40
    assert {bytes(each.ids.tolist()) for each in held_out} < set(read)
    assert next(iter(read.values())).place == f"{corpus / '00.txt'} byte 0"

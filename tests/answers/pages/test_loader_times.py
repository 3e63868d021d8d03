from trainledger.answers.pages.rates import document
from trainledger.observe.measure.rates import LoaderTimes
from trainledger.report.document import records
from trainledger.report.terminal import text
from trainledger.spec.calibration import LoaderTime

TIMES = (
    LoaderTime(what="tokenize text", workers=0, tokens=10**6, seconds=1.0),
    LoaderTime(what="read", workers=1, tokens=10**6, seconds=0.5),
    LoaderTime(what="read ahead by a thread", workers=1, tokens=10**6, seconds=0.25),
)


def loaded(needed=None):
    return document(
        LoaderTimes(
            data="the run's data", seq_len=1024, global_batch=8, times=TIMES, needed_tokens_per_second=needed
        )
    )  # fmt: skip


def test_whether_steps_wait_is_said():
    assert "4.0 times as many ahead: they do not wait" in " ".join(text(loaded(1e6)).split())
    assert "steps wait for tokens" in " ".join(text(loaded(8e6)).split())
    assert "wait" not in text(loaded())


def test_rates_are_beside_the_need_of_the_steps_but_for_tokenizing():
    assert [each["of need"] for each in records(loaded(1e6))] == [None, 2.0, 4.0]
    assert [each["tokens/s"] for each in records(loaded())] == [1e6, 2e6, 4e6]
    assert loaded(1e6).data()["times"][2]["tokens_per_second"] == 4e6

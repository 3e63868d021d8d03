"""What a watch says of steps that somebody made up, and when it is silent."""

from hypothesis import given
from hypothesis import strategies as st

from trainledger.observe.meter.watch import EVERY, WARM_UP, WINDOW, Seen, Watch, slow_rank

MIB = 1 << 20


def step(number, seconds=0.1, **more):
    phases = {"forward": 0.3 * seconds, "backward": 0.6 * seconds, "data": 0.1 * seconds * more.pop("data", 0.1)}
    phases["other"] = seconds - sum(phases.values())
    return Seen(number, seconds, phases, **more)


def findings(watch, steps):
    return [(each.step, each.name, each.sentence) for seen in steps for each in watch.see(seen)]


@given(st.lists(st.floats(0.95, 1.05), min_size=60, max_size=120), st.floats(1e-4, 10))
def test_steps_that_differ_a_little_are_nothing(factors, seconds):
    steps = [step(at, seconds * each, memory_nbytes=300 * MIB, others=0.0) for at, each in enumerate(factors, 1)]
    assert findings(Watch(1.1 * seconds), steps) == []


def test_warm_up_is_nothing():
    steps = [step(at, 5.0 if at <= WARM_UP else 0.1) for at in range(1, 60)]
    assert findings(Watch(0.1), steps) == []


def test_slower_since_a_step():
    steps = [step(at, 0.1 if at <= 50 else 0.15) for at in range(1, 120)]
    ((at, name, sentence),) = findings(Watch(), steps)
    assert name == "slower than before"
    assert 50 + WINDOW <= at <= 50 + 2 * WINDOW + EVERY
    assert "steps take 150 ms, 1.50 times as long as at first, most of it in backward (30 ms more)." in sentence


def test_what_is_over_is_said_again_when_it_comes_back():
    steps = [step(at, 0.15 if 60 < at <= 120 or at > 180 else 0.1) for at in range(1, 240)]
    assert [name for _, name, _ in findings(Watch(), steps)] == 2 * ["slower than before"]


def test_others_on_the_processor_are_the_cause():
    steps = [step(at, 0.1 if at <= 50 else 0.2, others=0.0 if at <= 50 else 0.9) for at in range(1, 120)]
    ((_, name, sentence),) = findings(Watch(), steps)
    assert name == "others on the processor"
    assert "other processes take 0.5 cores from this one, and steps take 1.50 times as long as at first" in sentence


def test_slower_than_the_forecast_and_where():
    steps = [step(at, 0.2) for at in range(1, 40)]
    ((at, name, sentence),) = findings(Watch(0.1, {"forward": 0.03, "backward": 0.06}), steps)
    assert (at, name) == (WINDOW + EVERY, "slower than forecast")
    assert sentence == "Steps take 200 ms, 2.00 times the forecast; 60 ms of the difference lie in backward."


def test_a_slower_processor_is_a_cause_and_no_finding_of_its_own():
    cause = "; the processor takes 1.60 times as long as at its full speed for a small matmul (a core shared with"
    slow = [step(at, 0.2, slowdown=1.6) for at in range(1, 40)]
    assert cause in findings(Watch(0.1), slow)[0][2]
    assert findings(Watch(0.2), slow) == []
    later = [step(at, 0.1 if at <= 50 else 0.15, slowdown=1.0 if at <= 50 else 1.6) for at in range(1, 120)]
    ((_, name, sentence),) = findings(Watch(), later)
    assert name == "slower than before"
    assert cause in sentence
    assert "processor" not in findings(Watch(0.1), [step(at, 0.2, slowdown=1.05) for at in range(1, 40)])[0][2]


def test_data():
    steps = [Seen(at, 0.1, {"data": 0.04, "forward": 0.06}) for at in range(1, 40)]
    ((_, name, sentence),) = findings(Watch(), steps)
    assert name == "slow data"
    assert sentence.startswith("Steps wait for their data: 40 ms of 100 ms (40.0 %)")


def test_memory_that_grows():
    steps = [step(at, memory_nbytes=300 * MIB + at * MIB) for at in range(1, 200)]
    ((at, name, sentence),) = findings(Watch(), steps)
    assert name == "memory grows"
    assert at <= 5 * WINDOW
    assert "Memory grows by 1.049 MB with each step" in sentence


def test_memory_that_settles_is_nothing():
    steps = [step(at, memory_nbytes=300 * MIB + min(at, 50) * MIB) for at in range(1, 200)]
    assert findings(Watch(), steps) == []


def test_a_slow_checkpoint_is_said_once():
    def saved(at):
        return {"outside": {"checkpoint": 1.0}, "saved_nbytes": 50_000_000} if at % 20 == 0 else {}

    steps = [step(at, **saved(at)) for at in range(1, 100)]
    ((at, name, sentence),) = findings(Watch(), steps)
    assert (at, name) == (20, "slow checkpoint")
    assert "took 1 s, 50 MB at 50 MB/s, 33.3 % of the time since the one before" in sentence


def test_a_slow_rank():
    assert slow_rank({0: 0.10, 1: 0.101, 2: 0.099}, 20) is None
    assert slow_rank({0: 0.10}, 20) is None
    found = slow_rank({0: 0.10, 1: 0.101, 2: 0.15, 3: 0.1}, 20)
    assert found.sentence.startswith("Rank 2 computes 150 ms in a step, 1.50 times as long as the others (100 ms)")

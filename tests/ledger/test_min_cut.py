"""What is kept at the least cost, against all there is to choose from."""

from itertools import combinations

from hypothesis import given
from hypothesis import strategies as st

from trainledger.ledger.memory.compiled_graph import values_to_keep


def enough(kept: set[int], edges: list[tuple[int, int]], fixed: set[int], needed: set[int]) -> bool:
    """Whether every needed value is kept or can be computed of what is."""
    before = {value: [a for a, b in edges if b == value] for value in range(10)}

    def there(value: int) -> bool:
        return value in kept or (value not in fixed and all(there(each) for each in before[value]))

    return all(there(each) for each in needed)


@given(data=st.data(), count=st.integers(2, 6))
def test_nothing_that_costs_less_is_enough(data: st.DataObject, count: int) -> None:
    pairs = list(combinations(range(count), 2))
    edges = data.draw(st.lists(st.sampled_from(pairs), unique=True))
    costs = {each: data.draw(st.integers(1, 9)) for each in range(count)}
    inputs = {each for each in range(count) if all(b != each for _, b in edges)}  # what is computed of nothing is given
    fixed = inputs | data.draw(st.sets(st.integers(0, count - 1)))
    needed = data.draw(st.sets(st.integers(0, count - 1), min_size=1))
    kept = values_to_keep(costs, edges, fixed, needed)
    assert enough(kept, edges, fixed, needed)
    choices = (set(some) for size in range(count + 1) for some in combinations(range(count), size))
    least = min(sum(costs[each] for each in some) for some in choices if enough(some, edges, fixed, needed))
    assert sum(costs[each] for each in kept) == least


def test_a_value_that_many_are_made_of_is_kept_in_their_place() -> None:
    edges = [("x", "a"), ("x", "b"), ("x", "c")]
    costs = {"x": 2, "a": 2, "b": 1, "c": 2}
    assert values_to_keep(costs, edges, ["x"], ["a", "b", "c"]) == {"x"}
    assert values_to_keep(costs, edges, ["x"], ["b"]) == {"b"}
    assert values_to_keep(costs, edges, ["x", "a"], ["a", "b", "c"]) == {"x", "a"}

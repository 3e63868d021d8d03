import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainledger.report.table import table, wrapped


def test_numbers_go_right_and_words_go_left():
    text = table(["what", "size"], [["parameters", "12 GB"], ["scratch", "3 GB"]])
    assert text.splitlines()[2:] == ["parameters  12 GB", "scratch      3 GB"]


def test_align_overrides_and_missing_cells_are_empty():
    text = table(["a", "b"], [["1"], ["22", None]], align="ll")
    assert text.splitlines()[2:] == ["1", "22"]


def test_long_cells_wrap_at_words_and_keep_every_word():
    words = [f"word{at}" for at in range(40)]
    text = table(["field", "rule", "value"], [["recipe.tokens", " ".join(words), "12"]])
    assert all(len(line) <= 80 for line in text.splitlines())
    assert all(word in text for word in words)


def test_a_sentence_is_broken_between_words():
    text = " ".join(f"word{at}" for at in range(40))
    assert wrapped("short") == "short"
    assert all(line.startswith("  word") and len(line) <= 80 for line in wrapped(f"  {text}").splitlines())
    assert max(map(len, wrapped(text).splitlines())) <= 80
    assert wrapped(text).split() == text.split()


def test_control_characters_do_not_reach_the_terminal():
    assert "\x1b" not in table(["a"], [["\x1b[31mred"]])


def test_a_number_stays_with_its_unit_while_a_text_can_give_way():
    path = "model.layers.0.self_attn.rotary_embedding.projection"
    numbers = ["158.3 TFLOP", "123.4 GB", "123.4 GB", "-12.34 GB"]
    lines = table(["path", "FLOPs", "read", "written", "kept"], [[path, *numbers]], align="lrrrr").splitlines()
    assert all(len(each) <= 80 for each in lines)
    assert lines[2].split()[1:] == " ".join(numbers).split()
    assert "".join(each.split()[0] for each in lines[2:]) == path
    assert all(each.split()[0].endswith(".") for each in lines[2:-1])


def test_a_word_that_must_be_broken_is_broken_at_a_comma():
    lines = table(["a", "b"], [["bf16[8,1024,768]", "bf16[8,1024,12,64]"]], width=30).splitlines()
    assert [each.split() for each in lines[2:]] == [["bf16[8,1024,", "bf16[8,1024,"], ["768]", "12,64]"]]


def test_a_row_longer_than_the_heading_is_refused():
    with pytest.raises(ValueError, match="2 cells for 1 columns"):
        table(["a"], [["1", "2"]])


@given(
    st.integers(1, 8).flatmap(
        lambda n: st.tuples(
            st.lists(st.text(max_size=30), min_size=n, max_size=n),
            st.lists(st.lists(st.text(max_size=90), min_size=n, max_size=n), max_size=5),
        )
    )
)
def test_no_line_passes_80_columns(drawn):
    columns, rows = drawn
    assert all(len(line) <= 80 for line in table(columns, rows).split("\n"))

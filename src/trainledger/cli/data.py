"""The verb that tokenizes a corpus and describes it."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

from trainledger.answers.load import assumed_of_text, load_file, run_of_text
from trainledger.answers.pages import token_store
from trainledger.answers.question import question, text, word
from trainledger.answers.source import is_text
from trainledger.cli.asking import say, while_searching
from trainledger.report.document import Document
from trainledger.spec.problem import InvalidInput, Problem
from trainledger.spec.reading import Overrides


@question(plots=False)
def data(
    run: Annotated[str, word("the run file (run.toml), or text itself: a file, a directory or a glob")] = "run.toml",
    overrides: Overrides = (),
    *,
    verify: Annotated[bool, text("read every file again and compare its SHA-256")] = False,
    show: Annotated[bool, text("print the first sequences of the first batch as text")] = False,
    lengths: Annotated[
        str | None, text("write how long documents are, for `plan --set data.lengths=FILE`", metavar="FILE")
    ] = None,
) -> Document:
    """Tokenize the corpus of a run file, or find it tokenized, and describe it.

    Of a .jsonl, .parquet or text file, a directory or a glob in place of a run file it is the corpus.
    """
    from trainledger.engine.data.mixture import mixed_batch, open_mixture
    from trainledger.engine.data.prepare import text_field_of

    if of_text := is_text(run):
        planned = run_of_text(run, overrides, text_field_of)
        if lengths is not None and not show and "data.validation_fraction" not in planned.origin.explicit:
            planned = replace(planned, data=replace(planned.data, validation_fraction=0.0))  # counts every document
        say(assumed_of_text(planned), wrap=True)
    else:
        planned = load_file(run, overrides, progress=while_searching())
    recipe, first_batch, vocab_size = planned.recipe, list[str](), planned.model.vocab_size
    if recipe.objective.answers:
        rule = "has answers to prompts, which are tokenized when training begins (trainledger train says how many)"
        raise InvalidInput([Problem("recipe.objective", recipe.objective.kind, rule, "next-token")])
    mixture = open_mixture(planned.data, vocab_size=vocab_size, progress=True)
    if not of_text:
        mixture.check_vocabulary(vocab_size)
    if show or not of_text:
        mixture.check_lengths(recipe.seq_len)
    if lengths is not None:
        token_store.keep_lengths(mixture, lengths)
    if verify:
        mixture.verify()
    if show:
        rows = mixed_batch(mixture, seed=recipe.seed, step=0, global_batch=recipe.global_batch, seq_len=recipe.seq_len)
        tokenizer = mixture.tokenizer()
        first_batch = [tokenizer.decode(row[:-1].tolist()) for row in rows[:2]]
    return token_store.page(mixture, recipe, verified=verify, first_batch=first_batch)

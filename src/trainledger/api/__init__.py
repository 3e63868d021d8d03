"""The Python face: a run from whatever names it (`load`), and the questions that it is asked (`cost`, `questions`).

The command line asks the same functions. Nothing here computes: a module reads what is asked, calls the room that
answers, and gives its answer.
"""

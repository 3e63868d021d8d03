"""The Python interface: a run from any name of it (`load`), and the questions about it (`cost`, `questions`).

The command line asks the same functions. Nothing here computes: a module reads what is asked, calls the room that
answers, and gives its answer.
"""

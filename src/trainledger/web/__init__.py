"""Calculators: a query in, an answer out, on the same functions as Python and the command line.

`answers` has one function for each way to ask. A server (`web.server`) and a page whose Python runs in the browser
(`web.export`) call it; neither has a formula of its own.
"""

"""Beside two other simulators of federated learning, pfl and fedjax: rounds per CPU second, and
ratios within one run.

Each side is a process of its own, with the interpreter that has its library. Sides take turns: a
turn of one is a number of rounds, answered by their CPU time.
"""

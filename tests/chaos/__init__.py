"""Injects faults into prep, training, evaluation and the report, and checks that each of them is survived.

`python -m chaos` runs every experiment within a budget of time; the quick tier is part of `make test`. An experiment is
one file in `experiments`.
"""

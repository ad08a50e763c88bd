"""`dare.py sweep`: settings chosen by an evaluation, with Optuna.

space: what may be chosen; evaluation: scores; bench: where models are made; search: the trials;
report: what was found; files: what is written.
"""

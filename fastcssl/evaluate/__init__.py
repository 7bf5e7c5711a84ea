"""Frozen encoders to tables of accuracies.

Runs and encoder files come in; one result file for each run, probe and scope goes out. Start with evaluate.py, which
plans the passes; probe_pass.py makes one, and probes/ holds one file for each kind of classifier.
"""

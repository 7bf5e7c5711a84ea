"""Evaluates frozen encoders and returns tables of accuracies.

It takes runs and encoder files, and writes one result file per run, probe and scope. Start with evaluate.py, which
plans the passes over the data. probe_pass.py makes one pass, and probes/ holds one module per kind of classifier.
"""

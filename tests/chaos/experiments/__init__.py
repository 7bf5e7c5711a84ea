"""Contains the experiments, one per file."""

"""Runs CUDA source without a GPU; see README.md."""

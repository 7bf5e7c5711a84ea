"""Writes and reads the folder of a run.

Training and evaluation hand over reports and states, which are written to files and read back as the same objects.
Start with layout.py, which knows every path. Each other module owns one kind of file, or shows what it holds.
"""

"""The folder of a run, written and read in one place.

Reports and states come in from training and evaluation, and files go out; read again, they become the same objects.
Start with layout.py, which knows every path; each other module owns one kind of file, or what is shown of it.
"""

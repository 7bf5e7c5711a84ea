"""Shards to batches of augmented views.

A prepared folder and a view policy come in; batches of normalised views on the training device go out. Start with
loader.py; prepared.py is what is read, views.py what a view is, draws.py every random choice, backends/ who decodes.
"""

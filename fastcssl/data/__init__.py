"""Turns shards into batches of augmented views.

The inputs are a prepared folder and a view policy. The outputs are batches of normalised views on the training device.
Start with loader.py. prepared.py opens the data, views.py defines a view, draws.py makes every random choice, and
backends/ decodes the images.
"""

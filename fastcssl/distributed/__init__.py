"""Several processes that train one model.

A `World` describes one process, or the ranks that torchrun started. It offers collectives that pass gradients on.
Nothing here knows about data or models, except that BatchNorm shares its statistics. Start with world.py.
"""

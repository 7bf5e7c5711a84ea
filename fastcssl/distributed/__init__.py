"""Several processes that train one model.

A `World` comes in (one process, or the ranks that torchrun started), and collectives with their gradients go out.
Nothing here knows of data or models, except that BatchNorm shares its statistics. Start with world.py.
"""

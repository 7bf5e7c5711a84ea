"""Turns batches of views into gradients.

Here are the networks, the banks and the losses. A training step takes views and returns named loss terms. Start with
step.py, which holds the one module that is trained. methods/ and strategies/ have one file per method and per strategy.
"""

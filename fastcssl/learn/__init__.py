"""Batches of views to gradients.

Views come in; named loss terms, and the networks and banks that they train, go out. Start with step.py, the one module
that is trained; methods/ and strategies/ hold one file each for what it is made of.
"""

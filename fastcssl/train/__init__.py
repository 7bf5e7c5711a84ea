"""Trains a run from a recipe and prepared data.

The input is a recipe and a folder of shards; the output is a run folder with encoders and checkpoints. Start reading
with loop.py, the training loop. build.py builds what it trains; session.py looks after the folder, the display and the
checkpoints.
"""

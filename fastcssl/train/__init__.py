"""A configuration and prepared data to a trained run.

A recipe and a folder of shards come in; a run folder with encoders and checkpoints goes out. Start with loop.py, the
training loop; build.py makes what it trains, and session.py keeps the folder, the display and the checkpoints.
"""

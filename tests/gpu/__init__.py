"""Tests that need a card: `fastcssl-doctor --full`, or `pytest tests/gpu -m gpu`. See conftest.py."""

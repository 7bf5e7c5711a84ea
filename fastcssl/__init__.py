"""Continual self-supervised learning on images, as fast as the hardware allows."""

__version__ = "0.1.0"
__all__ = ["__version__"]

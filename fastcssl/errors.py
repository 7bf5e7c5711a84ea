"""Defines the errors that a user's input or machine can cause. They are shown as a sentence, without a traceback.

The base class `UserError` comes from dataprep, so both packages share it.
"""

from dataprep.errors import UserError

__all__ = ["Diverged", "UserError"]


class Diverged(Exception):
    """Raised when the loss is no longer finite. The message gives the step, the terms and where the state was saved."""

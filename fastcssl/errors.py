"""Errors that a user's input or machine can cause. Each is shown as a sentence, without a traceback.

The base, `UserError`, is that of dataprep, so that both packages have one family.
"""

from dataprep.errors import UserError

__all__ = ["Diverged", "UserError"]


class Diverged(Exception):
    """The loss is not finite any more; says the step, the terms and where the state was saved."""

"""What a user's input or machine can cause. Shown as a sentence, without a traceback."""


class UserError(Exception):
    """Names the thing, what was seen, and the remedy; the command ends with status 2."""


class Diverged(Exception):
    """The loss is not finite any more; says the step, the terms and where the state was saved."""

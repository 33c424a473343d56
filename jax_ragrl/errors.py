"""Errors a user can act on: the command line prints them as one line and exits with code 2."""


class UserError(Exception):
    """Something the user gave cannot be used; the message says what, why, and what to do."""


class EffectError(Exception):
    """The retriever or the frozen language model failed after its retries: not a reward."""

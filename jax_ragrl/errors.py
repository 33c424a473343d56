"""Errors that a user can act on; the command line prints them as one line with exit code 2."""


class UserError(Exception):
    """An input cannot be used. The message says what was given, why it fails and what to do."""


class Preempted(Exception):  # noqa: N818 - not an error: the run can resume
    """A run stopped because it was asked to (SIGTERM). Its newest step is saved."""


class EffectError(Exception):
    """The retriever or the frozen language model failed after its retries.

    The question is excluded from training: a failure of a server says nothing about an action.
    """

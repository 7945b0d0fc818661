"""The one error of a run that a user can mend."""


class RunError(Exception):
    """A run cannot start or go on: one line that names what, where and the remedy. Exit code 1."""

"""The one error of a run that a user can mend, and what to say of those that it stands for."""


class RunError(Exception):
    """A run cannot start or go on: one line that names what, where and the remedy. Exit code 1."""


def reason(error: BaseException) -> str:
    """Why something could not be read, on one line, without the name of a Python class."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    if isinstance(error, KeyError):
        return f"it has no {error}"
    if isinstance(error, MemoryError):
        return "it asks for more memory than there is"
    if isinstance(error, RecursionError):
        return "it nests too deep"
    return " ".join(str(error).split())

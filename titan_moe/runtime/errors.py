"""The one error of a run that a user can mend, and what to say of those that it stands for."""

import errno

_AGAIN = "and start the same command again"
_REMEDIES = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT, errno.EFBIG), f"free some space {_AGAIN}"),
    errno.EROFS: f"make the file system writable {_AGAIN}",
    **dict.fromkeys((errno.EACCES, errno.EPERM), f"let this user read and write there {_AGAIN}"),
    **dict.fromkeys(
        (errno.EIO, errno.ESTALE, errno.ENOTCONN, errno.ENODEV),
        f"bring the file system back {_AGAIN}",
    ),
}


class RunError(Exception):
    """A run cannot start or go on: one line that names what, where and the remedy. Exit code 1."""


def disk_remedy(error: BaseException) -> str:
    """What to do about a file system that cannot be written to; empty for all other errors."""
    return _REMEDIES.get(error.errno or 0, "") if isinstance(error, OSError) else ""


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

"""The one error of a run that a user can mend, and what to say of those that it stands for."""

import errno
import re

CRASHED = 70
"""The exit code of an error in titan_moe itself, which prints a traceback."""
MACHINE = r"uncorrectable|\bECC\b|\bXid\b|NVLink|hardware|unknown error|busy or unavailable"
"""Words of CUDA's errors that a defective device causes. Its others, such as device-side asserts
and illegal memory accesses, are the program's."""
_OUTSIDE = re.compile(
    rf"{MACHINE}|out of ?memory|allocate memory|NCCL|gloo|Dist\w*Error|connection (closed|reset)",
    re.I,
)
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


def is_outside(error: BaseException) -> bool:
    """Memory, a device, a disk, the network or another rank has failed, not the program."""
    text = f"{type(error).__name__}: {error}"
    return isinstance(error, (OSError, MemoryError)) or _OUTSIDE.search(text) is not None


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

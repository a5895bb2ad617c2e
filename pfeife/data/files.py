"""Text files that anybody may have damaged, and that others may read while they are written."""

import os
import secrets
import stat
from pathlib import Path


def read_text(path: Path, largest: int) -> str:
    """The text of a UTF-8 file of at most `largest` bytes.

    Raises ValueError, with the path, for a file that is larger, for one that is not UTF-8, and
    for what is no regular file: a folder, or a pipe or device that might never end. What the
    system refuses (no such file, no permission) stays its OSError.
    """
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # a pipe is not waited for
    try:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise ValueError(f"{path}: not a regular file")
        with open(handle, "rb", closefd=False) as file:
            data = file.read(largest + 1)  # not what stat says: others may be writing
    finally:
        os.close(handle)
    if len(data) > largest:
        raise ValueError(f"{path}: larger than {largest} bytes")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: {error}") from None


def write_text(path: Path, text: str) -> None:
    """Writes a UTF-8 file at once: readers see the old file or the new one, also after a crash.

    The file has the permissions of the one that it replaces; a new one has those that open()
    gives, under the user's umask. What `path` links to is left alone, the link is replaced. If
    the writing fails, the old file is whole and nothing else is left. Raises ValueError for a
    path that is no regular file (/dev/null is not to become one), OSError for what the system
    refuses, and for an old file that the user may not write.
    """
    mode = _old_mode(path)
    beside = path.with_name(f".pfeife-{secrets.token_hex(8)}")  # one file system: a rename
    handle = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        with os.fdopen(handle, "wb") as file:
            if mode is not None:
                os.fchmod(handle, mode)
            file.write(text.encode("utf-8"))
            file.flush()
            os.fsync(handle)  # before the rename: else a crash may leave the new name empty
        os.replace(beside, path)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise


def _old_mode(path: Path) -> int | None:
    """The permissions of the file that is to be replaced, None where there is none."""
    try:
        old = path.stat()
    except FileNotFoundError:
        return None
    if not stat.S_ISREG(old.st_mode):
        raise ValueError(f"{path}: not a regular file, so it is not replaced by one")
    if not os.access(path, os.W_OK):
        raise PermissionError(f"{path}: may not be written")
    return old.st_mode & 0o777

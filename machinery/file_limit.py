"""The limit of open files of this process, which its children inherit."""

import contextlib
import resource
from typing import Final

MAX_FILES: Final = 65_536
# macOS refuses more than kern.maxfilesperproc, which was 10,240 for long, although the hard limit says "unlimited".
_FILES_OF_MACOS = 10_240


def raise_file_limit() -> int:
    """Raise the limit to what the system allows, 65,536 at most, and return it; 0 if there is none.

    A Mac's shell and launchd give 256, which few connections use up. A program may do nothing about that itself: etcd of
    Go before 1.19 does not.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return 0
    highest = MAX_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_FILES)
    for wanted in (highest, _FILES_OF_MACOS):
        if soft >= wanted:
            break
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
            return wanted
    return soft

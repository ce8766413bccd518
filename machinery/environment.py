"""The environment as what child processes inherit. Settings are read from it elsewhere: by click, at the edge."""

import os


def withhold(prefix: str) -> None:
    """Have the processes that we start from here on not inherit variables that begin so."""
    for name in [name for name in os.environ if name.startswith(prefix)]:
        del os.environ[name]

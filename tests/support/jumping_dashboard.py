"""The process `fleet-dashboard` with a wall clock that a test sets while it runs.

Arguments: a file with the seconds by which the clock is ahead, then those of `fleet-dashboard`. The clock of the
machine is not touched; every time that the process shows or records comes from the clock that is given to it.
"""

import sys
from datetime import datetime, timedelta
from pathlib import Path

from typing_extensions import override

import dashboard.__main__ as program
from identity import daemon
from machinery.clock import SystemClock


class JumpingClock(SystemClock):
    """The machine's clocks, but for a wall clock that is ahead by the seconds in a file."""

    _file = Path()

    @override
    def now(self) -> datetime:
        return super().now() + timedelta(seconds=float(self._file.read_text()))


if __name__ == "__main__":
    JumpingClock._file = Path(sys.argv.pop(1))
    # The clock that the command gives to all parts.
    vars(daemon)["SystemClock"] = JumpingClock
    program.main()

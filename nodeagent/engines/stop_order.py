"""The stop order: a file in an agent's state folder that keeps it from starting engines.

It works without the store and without the agent: write access to the folder is enough to stop its Mac.
"""

import json
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from machinery.clock import Clock
from machinery.files import write_atomically
from nodeagent.engines.engine_processes import stop_all

_MAX_BYTES = 4096
# An agent may have started one while the order was written.
_ROUNDS = 3


@dataclass(frozen=True, slots=True)
class StopOrder:
    """The stop order of one agent."""

    state_dir: Path

    @property
    def _file(self) -> Path:
        return self.state_dir / "stopped.json"

    def refusal(self) -> str:
        """Return why no engine may start; "" if there is no order."""
        try:
            with self._file.open("rb") as file:
                raw = file.read(_MAX_BYTES)
        except FileNotFoundError:
            return ""
        except OSError as error:
            return f"{self._file} cannot be read: {error.strerror}"
        try:
            since = f" since {datetime.fromisoformat(json.loads(raw)['at']):%Y-%m-%d %H:%M:%S} UTC"
        except (ValueError, KeyError, TypeError):
            since = ""
        return (
            f"engines are stopped on this Mac{since}; `fleetctl stop --local --undo` on it, or `fleetctl stop --all --undo`, "
            "lets them start again"
        )

    def give(self, at: datetime) -> None:
        """Write the order. Raises OSError."""
        write_atomically(self._file, json.dumps({"at": at.isoformat()}))

    def take_back(self) -> bool:
        """Remove the order; return whether there was one. Raises OSError."""
        was_given = self._file.exists()
        self._file.unlink(missing_ok=True)
        return was_given

    async def execute(self, clock: Clock, *, grace_s: float) -> int:
        """Write the order and end all engines, each after at most `grace_s`; return their number. Raises OSError."""
        self.give(clock.now())
        count = 0
        for _ in range(_ROUNDS):
            ended = await stop_all(self.state_dir / "engines", clock, grace_s=grace_s)
            count += ended
            if not ended:
                break
        return count

"""Which epochs of groups were used up on this node, on disk: a rank of one is started once, whoever forgets it."""

import json
from pathlib import Path

from machinery.files import write_atomically

_FILE = "epoch.json"


class Epochs:
    """The last epoch of each replica, below the folder of an agent's engines."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def use(self, replica: str, uid: str, epoch: int) -> None:
        """Note that a rank of the epoch is about to start. Raises OSError: it could not be noted."""
        words = json.dumps({"uid": uid, "epoch": epoch})
        write_atomically(self._folder / replica / _FILE, words)

    def last(self, replica: str, uid: str) -> int:
        """Return the last one of this very replica; 0 if there was none."""
        try:
            tree = json.loads((self._folder / replica / _FILE).read_text())
            return int(tree["epoch"]) if tree["uid"] == uid else 0
        except (OSError, ValueError, KeyError, TypeError):
            return 0

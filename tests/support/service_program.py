"""A program for services: starts one engine in a session of its own, as the node agent does, and runs until SIGTERM."""

import signal
import sys
from pathlib import Path

from machinery import processes


def main() -> None:
    """Run `service_program.py FOLDER WORD`: the word is what it prints."""
    folder = Path(sys.argv[1])
    record = folder / "engine.pid"
    if processes.adopt(record) is None:
        engine = processes.spawn(("sleep", "600"), log=folder / "engine.log")
        engine.record.save(record)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    print(sys.argv[2], flush=True)
    (folder / "words").write_text(" ".join(sys.argv[1:]))
    while True:
        signal.pause()


if __name__ == "__main__":
    main()

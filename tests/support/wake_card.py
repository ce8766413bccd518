"""The network card of a machine that sleeps: it reads magic packets, and continues the frozen processes.

`python -m tests.support.wake_card INTERFACE STATE_DIR LOG` in the network namespace of the machine.
"""

import os
import signal
import socket
import sys
from contextlib import suppress
from pathlib import Path

from tests.support.sleeping_agent import FROZEN


def main() -> None:
    interface, state_dir, log = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
    own = bytes.fromhex(
        Path(f"/sys/class/net/{interface}/address").read_text().strip().replace(":", "")
    )
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as card:
        card.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        card.bind(("", 9))
        log.write_text("")
        while True:
            packet, sender = card.recvfrom(2048)
            if b"\xff" * 6 + own * 16 not in packet:
                continue
            with log.open("a") as lines:
                lines.write(f"{sender[0]}\n")
            frozen = state_dir / FROZEN
            if not frozen.exists():
                continue
            pids = [int(word) for word in frozen.read_text().split()]
            frozen.unlink()
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)


if __name__ == "__main__":
    main()

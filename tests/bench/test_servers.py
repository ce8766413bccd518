"""Reasons that the bench of shard groups gives for a side that does not serve."""

import subprocess
import sys
from pathlib import Path

import pytest

from bench.harness import PeerError
from bench.servers import Server
from tests.support.ports import free_port


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        pytest.param("", "it ended with exit code 0: it wrote nothing", id="silent"),
        pytest.param(
            "raise SystemExit('no room')", "it ended with exit code 1: no room", id="with-a-reason"
        ),
        pytest.param(
            "import sys; sys.exit('OSError: port in use\\n\\x1b[33m[WARN] rank 0 was ended\\x1b[0m')",
            "it ended with exit code 1: OSError: port in use",
            id="of-a-launcher",
        ),
    ],
)
def test_a_peer_that_ends_is_blamed_with_its_exit_code(
    tmp_path: Path, code: str, reason: str
) -> None:
    log = tmp_path / "peer.log"
    with log.open("ab") as words:
        started = subprocess.Popen([sys.executable, "-c", code], stderr=words)
    side = Server(name="mlx_lm", model="m", port=free_port(), logs=[log], started=[started])
    try:
        with pytest.raises(PeerError, match=f"RuntimeError: {reason}"), side.blamed():
            side.until()
    finally:
        side.end()

"""Every shell block of the page Getting started, run in its order as a reader would: one Mac, then two on loopback."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from store.etcd.member.binary import locate
from tests.support.fleet import engine_port
from tests.support.pages import ROOT, CodeBlock, code_blocks
from tests.support.ports import free_port

PAGE = ROOT / "docs" / "getting-started.md"
_BLOCK_S = 400.0


class Reader:
    """A person with one shell for each Mac; `replaced` maps what the page says to this machine's ports and folders."""

    def __init__(self, home: Path, replaced: Mapping[str, str]) -> None:
        self._home = home
        self._replaced = replaced
        self._staying: list[subprocess.Popen[bytes]] = []
        self.env = {
            "HOME": str(home),
            "PATH": os.pathsep.join(
                [str(home / "bin"), str(Path(sys.executable).parent), os.environ["PATH"]]
            ),
            "PYTHONPATH": str(ROOT),
            "OPENBLAS_NUM_THREADS": "1",
            "TMPDIR": tempfile.gettempdir(),
        }

    def text(self, block: CodeBlock) -> str:
        """Return the block as it is run here."""
        text = block.text
        for old, new in self._replaced.items():
            text = text.replace(old, new)
        return text

    def run(self, block: CodeBlock) -> str:
        """Run a block to its end, in the shell that the blocks before have left; return its output."""
        if block.mark.startswith("stays"):
            return self._leave_running(block)
        path = self._home / "environment"
        script = f"set -e\n. {path}\n{self.text(block)}\nexport -p > {path}\n"
        path.touch()
        done = subprocess.run(
            ["bash", "-c", script],
            cwd=self._home, env=self.env, capture_output=True, text=True, timeout=_BLOCK_S, check=False,
        )  # fmt: skip
        assert done.returncode == 0, f"{block.place}: {done.stdout}\n{done.stderr}\n{self.logs()}"
        return done.stdout

    def _leave_running(self, block: CodeBlock) -> str:
        path = self._home / "environment"
        script = f". {path}\nexec {self.text(block)}"
        with (self._home / f"{len(self._staying)}.log").open("wb") as log:
            self._staying.append(
                subprocess.Popen(
                    ["bash", "-c", script],
                    cwd=self._home,
                    env=self.env,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                )
            )
        return ""

    def logs(self) -> str:
        """Return the ends of the logs of the processes that stay."""
        return "\n".join(path.read_text()[-2000:] for path in sorted(self._home.glob("*.log")))

    def end(self) -> None:
        """End what still runs: what stays in its terminal, and engines, which outlive their agents."""
        for process in self._staying:
            process.send_signal(signal.SIGTERM)
        for process in self._staying:
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
        for other in psutil.process_iter(["cmdline"]):
            if str(self._home) in " ".join(other.info["cmdline"] or ()):
                other.kill()


@contextmanager
def reader(models: Path, replaced: Mapping[str, str], **env: str) -> Iterator[Reader]:
    # A short path: etcd's socket is below it.
    home = Path(tempfile.mkdtemp(prefix="first-"))
    (home / "bin").mkdir()
    (home / "bin" / "etcd").symlink_to(locate(None).path)
    (home / "fleet").mkdir()
    (home / "models").symlink_to(models)
    one = Reader(home, replaced)
    one.env |= env
    try:
        yield one
    finally:
        one.end()
        shutil.rmtree(home, ignore_errors=True)


def blocks(first: str, last: str) -> list[CodeBlock]:
    """Return the shell blocks between two headings."""
    lines = PAGE.read_text().splitlines()
    start, end = lines.index(first), lines.index(last)
    found = [block for block in code_blocks(PAGE) if start < block.line < end]
    assert found
    assert {code_block.language for code_block in found} == {"sh"}
    return found


def answers(outputs: Sequence[str]) -> list[str]:
    """Return the texts of the answers among the outputs."""
    found = [json.loads(line) for out in outputs for line in out.splitlines() if line[:1] == "{"]
    return [one["choices"][0]["message"]["content"] for one in found]


def test_every_block_is_in_a_part_that_is_run() -> None:
    """Nothing that a reader is told to run is outside of the two parts below."""
    parts = [
        *blocks("## Install", "## One Mac"),
        *blocks("## One Mac", "## Two Macs"),
        *blocks("## Two Macs", "## Before you rely on it"),
    ]
    assert parts == list(code_blocks(PAGE))


@pytest.mark.full
@pytest.mark.fleet
@pytest.mark.timeout(600)
def test_one_mac(smollm2: Path) -> None:
    port = free_port()
    ports = f"--port {port} --engine-port {engine_port()} --agent-port 0"
    replaced = {
        # CI begins with a fresh clone and runs `make setup` itself.
        "make setup": f"make -C {ROOT} --dry-run setup > /dev/null",
        "fleetctl up ": f"fleetctl up {ports} ",
        "127.0.0.1:4000": f"127.0.0.1:{port}",
    }
    with reader(smollm2, replaced) as one:
        outputs = [
            one.run(block)
            for block in (*blocks("## Install", "## One Mac"), *blocks("## One Mac", "## Two Macs"))
        ]
    assert "modeldeployment/chat created" in "".join(outputs)
    assert "Paris" in "".join(outputs)
    assert len(answers(outputs)) == 1
    assert outputs[-1].startswith("stopped")


@pytest.mark.full
@pytest.mark.fleet
@pytest.mark.timeout(600)
def test_two_macs(smollm2: Path) -> None:
    etcd, join, gateway = free_port(), free_port(), free_port()
    # Both Macs are this machine, so that all nodes say that they share it.
    up = f"--nodes 2 --node-memory 4Gi --port {gateway} --etcd-port {etcd} --join-port {join}"
    up = f"{up} --engine-port {engine_port()} --agent-port 0"
    replaced = {
        "fleetctl up --detach --join 10.0.0.11": f"fleetctl up --detach {up} --join 127.0.0.1",
        "fleet-nodeagent ": f"fleet-nodeagent --part-of-machine --memory 4Gi --api-port 0 --engine-port {engine_port()} ",
        "replicas: 2": "replicas: 3",
        "10.0.0.11:4002": f"127.0.0.1:{join}",
        "10.0.0.11:4000": f"127.0.0.1:{gateway}",
    }
    found = blocks("## Two Macs", "## Before you rely on it")
    # On loopback a gateway requires no keys, unless it is told to.
    with reader(smollm2, replaced, FLEET_GATEWAY_AUTH="on") as one:
        try:
            outputs = [one.run(block) for block in found]
        finally:
            subprocess.run(
                ["fleetctl", "down", "--data-dir", f"{one.env['HOME']}/fleet"],
                env=one.env, check=False, timeout=120, capture_output=True,
            )  # fmt: skip
        text = "".join(outputs)
        assert "modeldeployment/pair condition met" in text
        assert len(answers(outputs)) == 1
    rows = [line.split() for line in text.splitlines() if line.startswith("pair-")]
    assert {"node-1", "node-2", "mac-2"} <= {word for row in rows for word in row}

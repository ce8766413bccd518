"""The parent's end of a worker: starts it, gives orders, ends it."""

import asyncio
import json
import sys
from asyncio.subprocess import PIPE, Process
from pathlib import Path

from bench.store.peers import interpreter
from bench.store.server import Server
from bench.store.ways import Way

ROOT = Path(__file__).parent.parent.parent
# A line of an answer is short, but an error may carry a peer's whole answer.
_LONGEST_LINE = 2**22


class WorkerError(Exception):
    """The work was not done; the message says why."""


class Worker:
    """One client's process."""

    def __init__(self, way: Way, process: Process, log: Path) -> None:
        self.way = way
        self._process = process
        self._log = log
        self.lost = ""
        """Reason why there are no more answers."""

    @classmethod
    async def start(cls, way: Way, server: Server, log: Path) -> "Worker":
        python = sys.executable if way.is_ours else str(interpreter())
        arguments = (way.module, way.option, server.url, str(server.pid))
        with log.open("wb") as errors:
            process = await asyncio.create_subprocess_exec(
                *(python, "-m", "bench.store.worker", *arguments),
                cwd=ROOT,
                stdin=PIPE,
                stdout=PIPE,
                stderr=errors,
                limit=_LONGEST_LINE,
            )
        worker = cls(way, process, log)
        try:
            await worker._answer(limit_s=30)
        except WorkerError:
            await worker.stop()
        return worker

    async def do(self, work: str, arguments: dict[str, object], limit_s: float) -> dict[str, float]:
        """Run the work; return its figures.

        Raises:
            WorkerError: it was not done.

        """
        if self.lost:
            raise WorkerError(self.lost)
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"work": work, **arguments}).encode() + b"\n")
        return await self._answer(limit_s)

    async def _answer(self, limit_s: float) -> dict[str, float]:
        assert self._process.stdout is not None
        try:
            async with asyncio.timeout(limit_s):
                line = await self._process.stdout.readline()
        except TimeoutError:
            self._process.kill()
            self.lost = f"not done within {limit_s:.0f} s"
            raise WorkerError(self.lost) from None
        if not line:
            words = self._log.read_text().strip().splitlines()
            self.lost = f"the process ended: {words[-1] if words else 'without a word'}"
            raise WorkerError(self.lost)
        answer = json.loads(line)
        if "error" in answer:
            raise WorkerError(str(answer["error"])[:200])
        return {str(name): float(value) for name, value in answer["figures"].items()}

    async def stop(self) -> None:
        if self._process.returncode is not None:
            return
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            async with asyncio.timeout(5):
                await self._process.wait()
        except TimeoutError:
            self._process.kill()
            await self._process.wait()

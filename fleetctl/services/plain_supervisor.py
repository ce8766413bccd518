"""The supervisor process of one plain service: runs its program, and restarts it with backoff until it is stopped."""

import asyncio
import os
import sys
from pathlib import Path

from fleetctl.services.plain import PlainFiles, read_definition
from machinery import process_log, processes
from machinery.clock import SystemClock
from machinery.files import write_atomically
from machinery.process_main import run_until_signal
from machinery.supervisor import Program, Supervisor

_WORDS = 3


def main() -> int:
    """Run `python -m fleetctl.services.plain_supervisor FOLDER NAME`; return the exit code."""
    if len(sys.argv) != _WORDS:
        print("usage: python -m fleetctl.services.plain_supervisor FOLDER NAME", file=sys.stderr)
        return 2
    process_log.setup("supervisor", "info")
    folder, name = Path(sys.argv[1]), sys.argv[2]
    files = PlainFiles(folder, name)
    lock = files.lock()
    if lock is None:
        return 0  # another supervisor was faster
    # Under the lock: the record of a supervisor that came too late would hide this one.
    own = processes.find_running(os.getpid())
    assert own is not None  # this very process
    own.record.save(files.supervisor)
    spec = read_definition(files.definition)
    supervisor = Supervisor(
        Program(
            name=name,
            command=spec.command,
            log=spec.log,
            record=files.program,
            cwd=spec.working_folder,
            grace_s=float(spec.stop_timeout_s),
            # For `fleetctl service status` and doctor: a program that ends again and again.
            before_start=lambda: write_atomically(files.restarts, str(supervisor.restarts)),
        ),
        SystemClock(),
    )

    async def run() -> None:
        try:
            await supervisor.start()
            await supervisor.run()
        except OSError as error:
            raise SystemExit(f"{name}: {error.strerror}: {error.filename}") from error
        finally:
            await asyncio.shield(supervisor.stop())

    with lock:
        return run_until_signal(run)


if __name__ == "__main__":
    sys.exit(main())

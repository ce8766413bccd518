"""People at the terminals of Macs, which are namespaces with home folders of their own."""

import os
import pty
import select
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

import psutil


@dataclass
class Newcomer:
    """A person at the terminal of one Mac."""

    home: Path
    address: str
    prefix: tuple[str, ...]
    typed: list[str] = field(default_factory=list)

    def type(self, line: str, **variables: str) -> str:
        """Run a line in a shell on a terminal; return what it shows. It fails if the line does."""
        self.typed.append(line)
        own = {"HOME": str(self.home), "PATH": f"{self.home}/.local/bin:/usr/bin:/bin:/usr/sbin"}
        main, terminal = pty.openpty()
        process = subprocess.Popen(
            (*self.prefix, "sh", "-c", line),
            cwd=self.home,
            env={**own, **variables, "TERM": "dumb", "OPENBLAS_NUM_THREADS": "1"},
            stdin=terminal,
            stdout=terminal,
            stderr=terminal,
            start_new_session=True,
        )
        os.close(terminal)
        shown = _read(main, process)
        assert process.wait() == 0, f"$ {line}\n{shown}\n{self.logs()}"
        return shown

    def logs(self) -> str:
        """Return the ends of all logs on this Mac."""
        return "\n".join(
            f"{path}: {path.read_text(errors='replace')[-1500:]}"
            for path in sorted(self.home.rglob("*.log"))
        )

    def end(self) -> None:
        """End what still runs on this Mac."""
        for process in psutil.process_iter(["environ"]):
            if (process.info["environ"] or {}).get("HOME", "").startswith(str(self.home)):
                process.kill()


def _read(main: int, process: subprocess.Popen[bytes]) -> str:
    """Return what is written to a terminal until the process has ended; its children may keep the terminal open."""
    shown = b""
    while True:
        is_over = process.poll() is not None
        if select.select([main], [], [], 0.2)[0]:
            try:
                shown += os.read(main, 65536)
            except OSError:  # closed by all
                break
        elif is_over:
            break
    os.close(main)
    return shown.decode(errors="replace").replace("\r\n", "\n")

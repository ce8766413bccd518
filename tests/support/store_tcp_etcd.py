"""An etcd on a loopback port, for tests of TLS, users and endpoint rotation."""

from pathlib import Path

from machinery.clock import SystemClock
from machinery.supervisor import Program, Supervisor
from store.errors import StoreError
from store.etcd.address import EtcdAddress
from store.etcd.connect import connect
from store.etcd.member.binary import locate
from tests.support.ports import free_port
from tests.support.waiting import until_async


class TcpEtcd:
    """One member; it runs inside its async context."""

    def __init__(
        self,
        folder: Path,
        *flags: str,
        scheme: str = "http",
        probe: EtcdAddress | None = None,
        binary: Path | None = None,
    ) -> None:
        self.port = probe_port(probe) if probe else free_port()
        self.url = f"{scheme}://127.0.0.1:{self.port}"
        self.address = probe or EtcdAddress(endpoints=(self.url,))
        peer = f"http://127.0.0.1:{free_port()}"
        command = (
            str(binary or locate(None).path),
            "--name=tcp",
            f"--data-dir={folder / 'tcp'}",
            f"--listen-client-urls={self.url}",
            f"--advertise-client-urls={self.url}",
            f"--listen-peer-urls={peer}",
            f"--initial-advertise-peer-urls={peer}",
            f"--initial-cluster=tcp={peer}",
            "--logger=zap",
            "--log-outputs=stderr",
            "--log-level=warn",
            *flags,
        )
        self.supervisor = Supervisor(
            Program(
                name="tcp-etcd",
                command=command,
                log=folder / "tcp.log",
                record=folder / "tcp.pid",
                grace_s=2.0,
            ),
            SystemClock(),
        )

    async def start(self) -> None:
        """Start it and wait until it answers; a refusal counts as an answer."""
        await self.supervisor.start()
        transport = connect(self.address)

        async def answers() -> bool:
            try:
                await transport.status()
            except StoreError:
                return False
            return True

        try:
            await until_async(answers, limit_s=20, what="etcd's first answer")
        finally:
            await transport.close()

    async def __aenter__(self) -> "TcpEtcd":
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.supervisor.stop()


def probe_port(address: EtcdAddress) -> int:
    """Return the port of the address's first URL."""
    return int(address.endpoints[0].rpartition(":")[2])

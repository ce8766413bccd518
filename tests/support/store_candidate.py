"""A process that campaigns in an election and prints when it starts and stops leading."""

import asyncio
import sys
from pathlib import Path

from machinery.clock import SystemClock
from store.etcd.address import EtcdAddress
from store.etcd.connect import connect
from store.leases import Election


async def main(socket: str, key: str, name: str) -> None:
    transport = connect(EtcdAddress(socket=Path(socket)))
    election = Election(transport, SystemClock(), key=key, ttl_s=3)
    print("stands", flush=True)
    leadership = await election.campaign(name)
    print(f"leads {leadership.epoch}", flush=True)
    await leadership.keep()
    print("lost", flush=True)
    await transport.close()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:4]))

"""A process that holds a lease: says when it has it, and when it knows that it lost it."""

import asyncio
import sys
from pathlib import Path

from machinery.clock import SystemClock
from store.address import EtcdAddress
from store.etcd import connect
from store.lease import LeaseSession
from store.port import Put


async def main(socket: str, key: str, ttl_s: int) -> None:
    transport = connect(EtcdAddress(socket=Path(socket)))
    session = LeaseSession(transport, SystemClock(), ttl_s=ttl_s)
    await session.open()
    await transport.commit([], [Put(key=key, value=b"alive", lease=session.id)])
    print("held", flush=True)
    await session.keep()
    print(f"lost valid={session.valid()}", flush=True)
    await transport.close()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], int(sys.argv[3])))

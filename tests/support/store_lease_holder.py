"""A process that acts for as long as its lease is valid, ten times a second, and says what it does.

It looks at its lease and writes at once, and what it writes lies on no lease: if it wrote after its
time, the write would be there to be seen.
"""

import asyncio
import sys
from pathlib import Path

from machinery.clock import SystemClock
from store.etcd.address import EtcdAddress
from store.etcd.connect import connect
from store.leases import LeaseSession
from store.port import Put, Transport


async def act(session: LeaseSession, transport: Transport, key: str) -> None:
    turn = 0
    while session.valid():
        turn += 1
        await transport.commit([], [Put(key=key, value=str(turn).encode())])
        print(f"acted {turn}", flush=True)
        await asyncio.sleep(0.1)
    print(f"stopped {turn}", flush=True)


async def main(socket: str, key: str, ttl_s: int) -> None:
    transport = connect(EtcdAddress(socket=Path(socket)))
    session = LeaseSession(transport, SystemClock(), ttl_s=ttl_s)
    await session.open()
    await transport.commit([], [Put(key=key, value=b"alive", lease=session.id)])
    print("held", flush=True)
    async with asyncio.TaskGroup() as group:
        group.create_task(act(session, transport, f"{key}/work"))
        await session.keep()
        print(f"lost valid={session.valid()}", flush=True)
    await transport.close()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], int(sys.argv[3])))

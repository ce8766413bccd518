"""The findings of agents about their machines: asked for at the same time, each within a limit."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from insight import process_client
from insight.doctor.machines import MachineReport
from insight.errors import ProcessRefusedError, ProcessUnreachableError
from insight.process_client import ProcessAddress
from insight.tickets import issue_tickets
from schemas.wire import findings as wire
from store.errors import StoreError
from store.port import Transport

_MAX_PARALLEL: Final = 32
# An agent's readers take eight seconds at most, and a second time for the system's log.
_LIMIT_S: Final = 20.0


async def examine_machines(
    transport: Transport, addresses: Sequence[ProcessAddress]
) -> list[MachineReport]:
    """Ask agents for the findings about their machines; those without an address are left out."""
    asked = {address.key.partition("/")[2]: address for address in addresses if address.url}
    slots = asyncio.Semaphore(_MAX_PARALLEL)

    async def examine(node: str, address: ProcessAddress, bearer: str) -> MachineReport:
        async with slots:
            try:
                document = await process_client.fetch(
                    address, wire.PATH, bearer=bearer, limit_s=_LIMIT_S
                )
                findings = wire.parse_findings(document)
            except (ProcessRefusedError, ProcessUnreachableError, ValueError) as error:
                return MachineReport(node=node, error=str(error))
        # Whom we asked is what we know; an agent could name any node.
        return MachineReport(
            node=node, findings=tuple(replace(finding, node=node) for finding in findings)
        )

    if not asked:
        return []
    try:
        async with issue_tickets(transport, [address.key for address in asked.values()]) as bearers:
            examinations = (examine(*item, bearers[item[1].key]) for item in asked.items())
            return list(await asyncio.gather(*examinations))
    except StoreError as error:
        why = f"no ticket can be written for it: {error}"
        return [MachineReport(node=node, error=why) for node in asked]

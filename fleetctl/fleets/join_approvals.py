"""Requests of machines that wait for an approval, as fleetctl shows and answers them."""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from fleetctl.cli.errors import FleetctlError
from fleetctl.fleets.join_material import authority_hash
from fleetctl.output.columns import age
from identity import join_requests
from identity.join_code import join_code
from schemas.trust import JoinDecision, PendingJoin
from store.port import Transport

TITLES = ("ID", "NAME", "CHIP", "MEMORY", "ADDRESS", "CONDITION", "AGE")


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitingMachine:
    """A request, its code and the answer to it."""

    request: PendingJoin
    code: str
    """The six words that the machine shows, unless a server sits in between."""
    decision: JoinDecision | None
    same_source: int = 1
    """The number of requests from its address."""

    @property
    def condition(self) -> str:
        """The state in one or two words, as of kubectl's certificate signing requests."""
        if self.request.is_issued:
            return "Approved,Issued"
        if self.decision is None:
            return "Pending"
        return "Approved" if self.decision.is_approved else "Denied"

    def row(self, now: datetime) -> tuple[str, ...]:
        """Return the cells of the table."""
        join = self.request
        memory = f"{join.memory_bytes >> 30}Gi" if join.memory_bytes else ""
        several = f" ({self.same_source} requests)" if self.same_source > 1 else ""
        source = join.source + several
        cells = (join.id, join.name, join.chip, memory, source, self.condition)
        return (*cells, age(join.created, now))

    def tree(self) -> dict[str, Any]:
        """Return the document for `-o json`.

        It has neither the code nor the hash that it is made of: an administrator must read the code from the screen of
        the machine.
        """
        left_out = {"request", "id", "is_issued", "key_hash"}
        spec = json.loads(self.request.model_dump_json(by_alias=True, exclude=left_out))
        metadata = {"name": self.request.id}
        status = {"condition": self.condition}
        return {"kind": "JoinRequest", "metadata": metadata, "spec": spec, "status": status}


async def list_machines(transport: Transport) -> list[WaitingMachine]:
    """Return all requests, the oldest first. Raises FleetctlError: the fleet has no authority; StoreError."""
    requests = await join_requests.list_requests(transport)
    if not requests:
        return []
    hashed = await authority_hash(transport)
    sources = Counter(request.source for request in requests)
    machines = []
    for request in requests:
        answered = await join_requests.find_decision(transport, request)
        code = join_code(hashed, bytes.fromhex(request.key_hash))
        machines.append(
            WaitingMachine(
                request=request,
                code=code,
                decision=answered and answered[0],
                same_source=sources[request.source],
            )
        )
    return machines


def pick(machines: Sequence[WaitingMachine], wanted: str) -> WaitingMachine:
    """Return the machine with this id or name. Raises FleetctlError: there is none, or there are several."""
    waiting_machines = [machine for machine in machines if machine.request.id == wanted]
    waiting_machines = waiting_machines or [
        machine for machine in machines if machine.request.name == wanted
    ]
    if not waiting_machines:
        names = ", ".join(sorted({machine.request.name for machine in machines}))
        hint = f"There are: {names}" if names else "No machine waits now"
        raise FleetctlError(
            f"no machine {wanted!r} waits for an approval. {hint}. A request ends ten minutes after its machine has "
            "gone; run `fleetctl join` there again"
        )
    if len(waiting_machines) > 1:
        ids = ", ".join(
            f"{waiting_machine.request.id} ({waiting_machine.request.source})"
            for waiting_machine in waiting_machines
        )
        raise FleetctlError(
            f"{len(waiting_machines)} machines ask for the name {wanted}: give an id: {ids}"
        )
    return waiting_machines[0]

"""The models on the disks of a fleet's Macs: questions and changes to all agents at once, each within a limit."""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Final, Generic, TypeVar

from pydantic import ValidationError

from fleetctl.cli.connect import open_store
from fleetctl.cli.errors import FleetctlError
from fleetctl.fleets.dialer import open_dialer
from fleetctl.fleets.stop_orders import read_addresses
from identity.dialer import Dialer
from insight import process_client
from insight.errors import ProcessError, ProcessRefusedError
from insight.process_client import ProcessAddress
from insight.tickets import issue_tickets
from schemas.meta import ApiModel
from schemas.wire import stored_models as wire
from schemas.wire.stored_models import ModelChange, ModelCheck, NodeModels, QuantizationReport
from store import keys
from store.port import Transport

Document = TypeVar("Document", bound=ApiModel)

_AT_ONCE: Final = 32
_LIMIT_S: Final = 20.0
# Reading a terabyte from an SSD takes a few minutes.
_HASH_LIMIT_S: Final = 3600.0
_NOT_FOUND: Final = 404


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeAnswer(Generic[Document]):
    """The answer of one Mac, or the reason why there is none."""

    node: str
    document: Document | None = None
    problem: str = ""
    is_absent: bool = False
    """True if the Mac answered that it does not have the model."""


def documents(answers: Sequence[NodeAnswer[Document]]) -> list[tuple[str, Document]]:
    """Return the documents of the Macs that answered, with the names of the Macs."""
    return [(answer.node, answer.document) for answer in answers if answer.document is not None]


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetAgents:
    """The agents of a fleet, with the tickets that they open for."""

    addresses: Mapping[str, ProcessAddress]
    """Addresses by node, sorted."""
    silent: Mapping[str, str]
    """Nodes without an address, with the reason."""
    bearers: Mapping[str, str]
    transport: Transport
    slots: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(_AT_ONCE))
    """Requests that are under way at a time."""

    async def models(self) -> list[NodeAnswer[NodeModels]]:
        """Return the models of each Mac."""
        return await self._ask(wire.PATH, NodeModels)

    async def models_of(self, node: str) -> NodeAnswer[NodeModels]:
        """Return the models of one Mac."""
        return await self._one(node, wire.PATH, NodeModels)

    async def check(
        self, wanted: Sequence[tuple[str, str]], *, hashes: bool
    ) -> list[NodeAnswer[ModelCheck]]:
        """Return the checks of models, each on one node, in the order of `wanted` (node, folder)."""
        request: dict[str, Any] = (
            {"limit_s": _HASH_LIMIT_S, "params": {"hash": "true"}} if hashes else {}
        )
        asked = [
            self._one(node, f"{wire.PATH}/{name}/check", ModelCheck, **request)
            for node, name in wanted
        ]
        return list(await asyncio.gather(*asked))

    async def change_one(self, node: str, name: str, verb: str) -> NodeAnswer[ModelChange]:
        """Pin, unpin or remove a model of one Mac."""
        method = "PUT" if verb == "pin" else "DELETE"
        path = f"{wire.PATH}/{name}" + ("" if verb == "rm" else "/pin")
        return await self._one(node, path, ModelChange, method=method)

    async def fetch(self, params: Mapping[str, str]) -> list[NodeAnswer[ModelChange]]:
        """Start a fetch on each Mac."""
        return await self._ask(wire.FETCHES_PATH, ModelChange, method="POST", params=params)

    async def quantize(
        self, node: str, params: Mapping[str, str]
    ) -> NodeAnswer[QuantizationReport]:
        """Start a quantization on a Mac, or find the one that runs, or its result."""
        return await self._one(
            node, wire.QUANTIZATIONS_PATH, QuantizationReport, method="POST", params=params
        )

    async def cancel_quantization(self, node: str, name: str) -> NodeAnswer[QuantizationReport]:
        """Cancel a quantization on a Mac, by the name of its result."""
        path = f"{wire.QUANTIZATIONS_PATH}/{name}"
        return await self._one(node, path, QuantizationReport, method="DELETE")

    async def _ask(
        self,
        path: str,
        kind: type[Document],
        **request: Any,
    ) -> list[NodeAnswer[Document]]:
        nodes = (*self.addresses, *self.silent)
        asked = [self._one(node, path, kind, **request) for node in nodes]
        return sorted(await asyncio.gather(*asked), key=lambda one: one.node)

    async def _one(
        self,
        node: str,
        path: str,
        kind: type[Document],
        **request: Any,
    ) -> NodeAnswer[Document]:
        address = self.addresses.get(node)
        if address is None:
            return NodeAnswer(
                node=node, problem=self.silent.get(node, f"node/{node} does not exist")
            )
        async with self.slots:
            try:
                body = await process_client.fetch(
                    address,
                    path,
                    bearer=self.bearers.get(address.key, ""),
                    **{"limit_s": _LIMIT_S, **request},
                )
                return NodeAnswer(node=node, document=kind.model_validate_json(body))
            except ProcessRefusedError as error:
                is_absent = error.status == _NOT_FOUND and "is not on this Mac" in str(error)
                return NodeAnswer(node=node, problem=str(error), is_absent=is_absent)
            except ProcessError as error:
                return NodeAnswer(node=node, problem=str(error))
            except ValidationError as error:
                why = error.errors()[0]["msg"]
                return NodeAnswer(
                    node=node,
                    problem=f"node/{node}: unexpected answer ({why}); is it another release?",
                )


@asynccontextmanager
async def open_agents(
    options: dict[str, Any], nodes: Sequence[str] = ()
) -> AsyncIterator[FleetAgents]:
    """Yield the agents of these nodes, or of all nodes that the fleet knows.

    Raises:
        FleetctlError: a node does not exist.
        StoreError: the store does not answer, or refuses to write tickets for this user.

    """
    async with AsyncExitStack() as stack:
        transport = await stack.enter_async_context(open_store(options))
        dialer = await open_dialer(options, transport)
        addresses, silent = await _addresses(transport, dialer, nodes)
        holders = [address.key for address in addresses.values()]
        bearers: Mapping[str, str] = {}
        if holders:
            bearers = await stack.enter_async_context(issue_tickets(transport, holders))
        yield FleetAgents(addresses=addresses, silent=silent, bearers=bearers, transport=transport)


async def _addresses(
    transport: Transport, dialer: Dialer, nodes: Sequence[str]
) -> tuple[dict[str, ProcessAddress], dict[str, str]]:
    urls = await read_addresses(transport, dialer)
    items = (await transport.list(keys.status_prefix("Node"))).items
    known = sorted(keys.kind_and_name(item.key)[1] for item in items)
    if absent := sorted(set(nodes) - set(known)):
        raise FleetctlError(
            f"no node {', '.join(absent)}; this fleet has {', '.join(known) or 'none'}"
        )
    chosen = sorted(set(nodes)) or known
    addresses = {
        name: process_client.agent_address(dialer, name, urls[name])
        for name in chosen
        if name in urls
    }
    silent = {name: f"node/{name}: its agent serves no API" for name in chosen if name not in urls}
    return addresses, silent

"""Whose logs are meant: from words and flags to processes, and where each of them runs. Reads the store, asks nobody."""

from dataclasses import dataclass, replace

import click

from fleetctl import agents, selector
from fleetctl.errors import FleetctlError
from fleetctl.kinds import kind_of
from manifests.missing import not_found
from schemas.replica import Replica
from store import keys, objects
from store.port import Transport

# What kubectl's users type for what declares replicas.
_DEPLOYMENT = ("deploy", "deployment", "deployments")
_OF_REPLICAS = "only replicas have ranks, previous runs and labels"


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What was asked for; `kind` is that of a replica where only a selector was given."""

    kind: str = "Replica"
    name: str = ""
    selector: str = ""
    rank: int | None = None
    all_ranks: bool = False
    all_replicas: bool = False
    is_previous: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """One log."""

    label: str
    """Where its lines are from, for people: `replica/qwen-0/rank-1`, `node/mac-1`."""
    kind: str
    """Who has it: Node or Gateway."""
    holder: str
    """The name of the node, or the id of the gateway."""
    path: str
    params: dict[str, str]


def parse(word: str, wanted: Wanted) -> Wanted:
    """Return what is wanted with the kind and name in `qwen-0`, `deploy/qwen`, `node/mac-1`, `gateway/ID`.

    Raises:
        click.UsageError: such objects have no log, or not one of the wanted kind.

    """
    before, slash, name = word.partition("/")
    if before.lower() in ("gateway", "gateways"):
        found = replace(wanted, kind="Gateway", name=name)
    elif not slash:
        found = replace(wanted, name=word)
    else:
        kind = "ModelDeployment" if before.lower() in _DEPLOYMENT else kind_of(before).name
        found = replace(wanted, kind=kind, name=name)
    if found.kind not in ("Replica", "ModelDeployment", "Node", "Gateway"):
        raise click.UsageError(
            f"{word}: a {found.kind} has no log; replicas, deployments, nodes and gateways have"
        )
    if slash and not name and found.kind != "Gateway":
        raise click.UsageError(f"{word}: which one? Write {before}/NAME")
    _refuse_flags(word, found)
    return found


def _refuse_flags(word: str, found: Wanted) -> None:
    if found.all_replicas and found.kind != "ModelDeployment":
        raise click.UsageError("--all-replicas is for deploy/NAME")
    of_replicas = {
        "--rank": found.rank is not None,
        "--all-ranks": found.all_ranks,
        "--previous": found.is_previous,
    }
    given = [flag for flag, is_given in of_replicas.items() if is_given]
    if given and found.kind in ("Node", "Gateway"):
        raise click.UsageError(f"{given[0]} says nothing about {word}: {_OF_REPLICAS}")


async def find(transport: Transport, wanted: Wanted) -> list[Source]:
    """Return the logs that are meant.

    Raises:
        FleetctlError: there is no such object, or it has no such rank.

    """
    if wanted.kind == "Node":
        return [_of_agent(wanted.name)]
    if wanted.kind == "Gateway":
        return [_of_gateway(wanted.name or await _only_gateway(transport))]
    replicas = await _replicas(transport, wanted)
    return [source for one in replicas for source in _of_replica(one, wanted)]


def _of_agent(name: str) -> Source:
    return Source(label=f"node/{name}", kind="Node", holder=name, path="/v1/logs/agent", params={})


def _of_gateway(id_: str) -> Source:
    return Source(
        label=f"gateway/{id_}", kind="Gateway", holder=id_, path="/v1/logs/gateway", params={}
    )


def _of_replica(replica: Replica, wanted: Wanted) -> list[Source]:
    ranks = replica.spec.ranks
    numbers = range(len(ranks)) if wanted.all_ranks else (wanted.rank or 0,)
    if numbers[-1] >= len(ranks):
        there = "rank 0 only" if len(ranks) == 1 else f"ranks 0 to {len(ranks) - 1}"
        raise FleetctlError(f"replica/{replica.name} has no rank {wanted.rank}: it has {there}")
    return [
        Source(
            label=f"replica/{replica.name}/rank-{number}",
            kind="Node",
            holder=ranks[number].node,
            path=f"/v1/logs/replicas/{replica.name}",
            params={
                "rank": str(number),
                **({"previous": "true"} if wanted.is_previous else {}),
            },
        )
        for number in numbers
    ]


async def _only_gateway(transport: Transport) -> str:
    found = await agents.gateways(transport)
    if len(found) == 1:
        return found[0].key.removeprefix("Gateway/")
    if not found:
        raise FleetctlError("no gateway is registered. Is one running? `fleetctl up` runs one")
    known = ", ".join(one.label for one in found)
    raise FleetctlError(f"which gateway? There are {known}")


async def _replicas(transport: Transport, wanted: Wanted) -> list[Replica]:
    """Return the replicas that are meant, by name; says so where one of several was taken, or none found."""
    there = await objects.list_all(transport, Replica)
    if wanted.selector:
        found = selector.select(there, selector.parse(wanted.selector))
        if not found:
            click.echo("no replicas found", err=True)
        return found
    if wanted.kind == "Replica":
        found = [one for one in there if one.name == wanted.name]
        if not found:
            names = [one.name for one in there]
            raise FleetctlError(await _no_replica(transport, wanted.name, names))
        return found
    found = [one for one in there if one.spec.deployment == wanted.name]
    if not found:
        raise FleetctlError(await _no_replicas_of(transport, wanted.name))
    if len(found) > 1 and not wanted.all_replicas:
        click.echo(f"Found {len(found)} replicas, using replica/{found[0].name}", err=True)
        return found[:1]
    return found


async def _no_replica(transport: Transport, name: str, there: list[str]) -> str:
    """Return the refusal; a deployment's name, a node's or a gateway's is easily meant."""
    others = {
        "deploy": keys.spec_key("ModelDeployment", name),
        "node": keys.status_key("Node", name),
    }
    for typed, key in others.items():
        if await transport.get(key) is not None:
            return f'replicas "{name}" not found; did you mean {typed}/{name}?'
    return not_found(kind_of("replica"), name, there)


async def _no_replicas_of(transport: Transport, name: str) -> str:
    items = (await transport.list(keys.spec_prefix("ModelDeployment"))).items
    names = [keys.kind_and_name(item.key)[1] for item in items]
    if name not in names:
        return not_found(kind_of("md"), name, names)
    return f"modeldeployment/{name} has no replicas; `fleetctl describe md {name}` says why"

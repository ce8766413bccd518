"""Which deployments the verbs of `fleetctl rollout` are about."""

from collections.abc import Sequence

import click

from fleetctl import reader, targets
from fleetctl.errors import FleetctlError
from fleetctl.kinds import kind_of
from machinery.clock import Clock
from schemas import kinds
from schemas.deployment import ModelDeployment
from store import objects
from store.port import Transport


def names_of(words: Sequence[str]) -> list[str]:
    """Return the names in `md/qwen`, `modeldeployment qwen` or `qwen`.

    Raises:
        click.UsageError: it is of another kind, or there is no name.

    """
    first = words[0]
    # A kind and its names, unless the word is the name of a deployment that stands alone.
    rest = words[1:] if "/" not in first and len(words) > 1 and kinds.by_alias(first) else words
    if rest is not words:
        _check(first)
    found = []
    for word in rest:
        kind, slash, name = word.partition("/")
        if slash:
            _check(kind)
        found.append(name if slash else word)
    return found


def one_name(words: Sequence[str]) -> str:
    """Return the one name in the words; `names_of` has the errors."""
    names = names_of(words)
    if len(names) != 1:
        raise click.UsageError("one deployment at a time; write NAME or modeldeployment/NAME")
    return names[0]


def _check(word: str) -> None:
    kind = kind_of(word)
    if kind.type is not ModelDeployment:
        raise click.UsageError(
            f"{kind.plural} are neither placed nor rolled out; write NAME or modeldeployment/NAME"
        )


async def read(transport: Transport, name: str) -> ModelDeployment:
    """Return the deployment with its status.

    Raises:
        FleetctlError: there is none of that name; with the nearest.

    """
    found = await objects.get(transport, ModelDeployment, name)
    if found is not None:
        return found
    there = [obj.name for obj in await reader.read(transport, kind_of("md"), ())]
    raise FleetctlError(reader.not_found(kind_of("md"), name, there))


async def change(
    transport: Transport,
    clock: Clock,
    name: str,
    edit: targets.Edit[ModelDeployment],
    *,
    is_dry: bool = False,
) -> bool:
    """Change one deployment that is not being deleted; `targets.write` has the errors."""

    def checked(obj: ModelDeployment) -> ModelDeployment | None:
        if obj.metadata.deletion_timestamp is not None:
            raise FleetctlError(f"modeldeployment/{name} is being deleted; nothing was changed")
        return edit(obj)

    there = await read(transport, name)
    written = await targets.write(
        transport, clock, there, checked, manager="fleetctl-rollout", is_dry=is_dry
    )
    return written.is_news

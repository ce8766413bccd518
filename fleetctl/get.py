"""`fleetctl get`: objects as tables, YAML, JSON or names; with -w as they change."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import click
import orjson

from fleetctl import apikeys, printers, reader, selector
from fleetctl.connect import opened, run, store_options
from fleetctl.kinds import Target, target_of
from machinery.clock import SystemClock
from manifests import yamlio
from manifests.tree import tree_of
from schemas.meta import ApiObject
from store import keys
from store.errors import CompactedError, UnavailableError
from store.port import Transport

_FORMATS = ("table", "wide", "yaml", "json", "name")
_SETTLE_S = 0.05


@click.command()
@click.argument("what", nargs=-1, required=True, metavar="KIND [NAME...] | KIND/NAME")
@click.option("-o", "--output", type=click.Choice(_FORMATS), default="table", show_default=True)
@click.option("-l", "--selector", default="", help="Only objects with these labels: k=v,k=v.")
@click.option("-w", "--watch", is_flag=True, help="Go on, and show what changes.")
@click.option("--no-headers", is_flag=True, help="Leave out the line of titles.")
@store_options
def get(what: tuple[str, ...], watch: bool, **options: Any) -> None:
    """Show objects. KIND may be singular, plural or short: md, np, sg, mr, no, rep, ep, ev; API keys: apikeys."""
    names = apikeys.names_of(what)
    if names is not None:
        if watch:
            raise click.UsageError("API keys cannot be watched; leave out -w")
        run(apikeys.show(names, options))
        return
    target = target_of(what)
    shown = Shown(target, options)
    run(_watch(shown, options) if watch else _once(shown, options))


async def _once(shown: "Shown", options: dict[str, Any]) -> None:
    async with opened(options) as transport:
        await shown.show(transport)


class Shown:
    """What was asked for and how it is printed; remembers what it printed."""

    def __init__(self, target: Target, options: dict[str, Any]) -> None:
        self._target = target
        self._output: str = options["output"]
        self._selector = selector.parse(options["selector"])
        if target.names and self._selector:
            raise click.UsageError("name objects, or select them with -l, not both")
        self._headers = not options["no_headers"]
        self._printed: dict[str, str] = {}

    async def show(self, transport: Transport) -> None:
        """Print everything that was asked for."""
        found = await self._read(transport)
        if not found and self._output in ("table", "wide"):
            click.echo(f"no {self._target.kind.plural} found", err=True)
            return
        moment = await reader.moment(transport, SystemClock(), self._target.kind)
        click.echo(self._text(found, moment), nl=False)

    async def show_changes(self, transport: Transport, *, is_first: bool) -> None:
        """Print what is not as it was printed last."""
        found = await self._read(transport)
        moment = await reader.moment(transport, SystemClock(), self._target.kind)
        fresh = [obj for obj in found if self._is_news(obj, moment)]
        for name in set(self._printed) - {obj.name for obj in found}:
            del self._printed[name]
        if fresh:
            headers, self._headers = self._headers, is_first and self._headers
            click.echo(self._text(fresh, moment), nl=False)
            self._headers = headers

    async def _read(self, transport: Transport) -> list[ApiObject]:
        found = await reader.read(transport, self._target.kind, self._target.names)
        return selector.select(found, self._selector)

    def _is_news(self, obj: ApiObject, moment: printers.Moment) -> bool:
        now = self._essence(obj, moment)
        before = self._printed.get(obj.name)
        self._printed[obj.name] = now
        return now != before

    def _essence(self, obj: ApiObject, moment: printers.Moment) -> str:
        """Return what makes a line news: of a table, what it shows but for times."""
        if self._output in ("table", "wide"):
            return printers.timeless(obj, moment, is_wide=self._output == "wide")
        return obj.model_dump_json()

    def _text(self, found: list[ApiObject], moment: printers.Moment) -> str:
        if self._output == "name":
            return "".join(f"{obj.kind.lower()}/{obj.name}\n" for obj in found)
        if self._output == "json":
            return orjson.dumps(self._tree(found), option=orjson.OPT_INDENT_2).decode() + "\n"
        if self._output == "yaml":
            return yamlio.dump(self._tree(found))
        wide = self._output == "wide"
        return printers.table(found, moment, is_wide=wide, headers=self._headers) + "\n"

    def _tree(self, found: list[ApiObject]) -> dict[str, Any]:
        trees = [tree_of(obj) for obj in found]
        if len(self._target.names) == 1 and len(trees) == 1:
            return trees[0]
        return {"apiVersion": "v1", "kind": "List", "items": trees}


async def _watch(shown: Shown, options: dict[str, Any]) -> None:
    """Print again whenever something below the root moved; breaks of the watch do not show."""
    async with opened(options) as transport:
        await shown.show_changes(transport, is_first=True)
        async for _ in _changes(transport):
            await shown.show_changes(transport, is_first=False)


async def _changes(transport: Transport) -> AsyncIterator[None]:
    revision = (await transport.status()).revision
    while True:
        try:
            async with aclosing(transport.watch(f"{keys.ROOT}/", after_revision=revision)) as watch:
                async for batch in watch:
                    revision = batch.revision
                    if batch.changes:
                        # Spec and status of one change arrive apart; one line is enough.
                        await asyncio.sleep(_SETTLE_S)
                        yield
        except CompactedError:
            revision = (await transport.status()).revision
            yield
        except UnavailableError:
            await asyncio.sleep(0.5)

"""Prints the result of verbs that change objects: a status line, or the object in the format of -o."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import click
import orjson

from fleetctl.cli.documents import print_tree, tree_text
from manifests.trees import Tree, object_tree
from schemas.meta import ApiObject

DryRun: TypeAlias = Literal["none", "client", "server"]

_DRY_RUN_SUFFIXES = {"none": "", "client": " (dry run)", "server": " (server dry run)"}


@dataclass(slots=True, kw_only=True)
class ResultPrinter:
    """Prints objects one after the other."""

    output: str | None = None
    dry_run: DryRun = "none"
    count: int = 0

    @classmethod
    def of(cls, options: dict[str, Any]) -> "ResultPrinter":
        """Return the printer for the flags."""
        return cls(output=options.get("output"), dry_run=options["dry_run"])

    @property
    def is_dry(self) -> bool:
        return self.dry_run != "none"

    @property
    def suffix(self) -> str:
        """The end of a status line: empty, or the kind of dry run."""
        return _DRY_RUN_SUFFIXES[self.dry_run]

    def print_object(self, obj: ApiObject, done: str) -> None:
        """Print one object, or `nodepool/a patched (dry run)`."""
        self._print(lambda: object_tree(obj), obj, done)

    def print_declared(self, obj: ApiObject, done: str) -> None:
        """Print an object of a manifest that was not written: the fields of the manifest, without defaults."""
        self._print(lambda: _given_tree(obj), obj, done)

    def _print(self, tree: Callable[[], dict[str, Tree]], obj: ApiObject, done: str) -> None:
        """Print one object; ten thousand status lines need no trees."""
        name = f"{obj.kind.lower()}/{obj.name}"
        match self.output:
            case "name":
                click.echo(name)
            case "yaml":
                text = tree_text(_without_managed_fields(tree()), "yaml")
                click.echo(("---\n" if self.count else "") + text, nl=False)
            case "json":
                print_tree(_without_managed_fields(tree()), "json")
            case _:
                click.echo(f"{name} {done}{self.suffix}")
        self.count += 1

    def print_deleted(self, name: str, done: str) -> None:
        """Print that an object was deleted; with -o yaml or json to stderr, because it is not a document."""
        text = name if self.output == "name" else f"{name} {done}{self.suffix}"
        click.echo(text, err=self.output in ("yaml", "json"))


def _given_tree(obj: ApiObject) -> dict[str, Tree]:
    """Return the fields that a manifest gives."""
    tree: dict[str, Tree] = orjson.loads(
        obj.model_dump_json(by_alias=True, exclude_none=True, exclude_unset=True)
    )
    return {"apiVersion": obj.api_version, "kind": obj.kind, **tree}


def _without_managed_fields(tree: dict[str, Tree]) -> dict[str, Tree]:
    """Return the object without managedFields, as `fleetctl get -o yaml` shows it."""
    metadata = tree["metadata"]
    assert isinstance(metadata, dict)
    kept = {key: value for key, value in metadata.items() if key != "managedFields"}
    return {**tree, "metadata": kept}

"""What verbs that change objects say of each, in the form that -o asks for; and their flag --dry-run."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import click
import orjson

from machinery.typing_compat import override
from manifests.trees import Tree, object_tree
from manifests.yaml import parser
from schemas.meta import ApiObject

DryRun: TypeAlias = Literal["none", "client", "server"]

_DRY_RUN_SUFFIXES = {"none": "", "client": " (dry run)", "server": " (server dry run)"}


class DryRunChoice(click.Choice[str]):
    """The values of --dry-run. Without one, or with what follows it taken for one, it says how it is written."""

    @override
    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> str:
        if value not in self.choices:
            forms = " or ".join(f"--dry-run={one}" for one in self.choices if one != "none")
            known = ", ".join(map(repr, self.choices))
            given = f"{value!r} is not one of {known}" if value else "it needs a value"
            self.fail(f"{given}; write {forms}", param, ctx)
        return super().convert(value, param, ctx)


def dry_run(
    values: Sequence[str], help_: str
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return the decorator for a --dry-run with these values, the first of which is its default."""
    return click.option(
        "--dry-run",
        type=DryRunChoice(values),
        default=values[0],
        show_default=True,
        is_flag=False,
        flag_value="",  # alone, as old kubectl had it: DryRunChoice says what to write
        metavar=f"[{'|'.join(values)}]",
        help=help_,
    )


def result_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add -o and --dry-run."""
    output = click.option(
        "-o",
        "--output",
        type=click.Choice(["name", "yaml", "json"]),
        help="Print each object, instead of what became of it.",
    )
    return output(dry_run_option(command))


def dry_run_option(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add --dry-run."""
    help_ = "Write nothing. client: say what would be written; server: check it against the store as well."
    return dry_run(("none", "client", "server"), help_)(command)


@dataclass(slots=True, kw_only=True)
class ResultPrinter:
    """Prints objects one after the other."""

    output: str | None = None
    dry_run: DryRun = "none"
    count: int = 0

    @classmethod
    def of(cls, options: dict[str, Any]) -> "ResultPrinter":
        """Return what prints as the flags say."""
        return cls(output=options.get("output"), dry_run=options["dry_run"])

    @property
    def is_dry(self) -> bool:
        return self.dry_run != "none"

    @property
    def suffix(self) -> str:
        """What follows the word for what was done."""
        return _DRY_RUN_SUFFIXES[self.dry_run]

    def say(self, obj: ApiObject, done: str) -> None:
        """Print one object, or `nodepool/a patched (dry run)`."""
        self.show(object_tree(obj), f"{obj.kind.lower()}/{obj.name}", done)

    def declare(self, obj: ApiObject, done: str) -> None:
        """Print an object of a manifest that was not written: what the manifest says, without defaults."""
        tree: dict[str, Tree] = orjson.loads(
            obj.model_dump_json(by_alias=True, exclude_none=True, exclude_unset=True)
        )
        whole = {"apiVersion": obj.api_version, "kind": obj.kind, **tree}
        self.show(whole, f"{obj.kind.lower()}/{obj.name}", done)

    def show(self, tree: dict[str, Tree], name: str, done: str) -> None:
        """Print one object that is there as a tree."""
        match self.output:
            case "name":
                click.echo(name)
            case "yaml":
                click.echo(
                    ("---\n" if self.count else "") + parser.dump(_without_managed_fields(tree)),
                    nl=False,
                )
            case "json":
                click.echo(
                    orjson.dumps(_without_managed_fields(tree), option=orjson.OPT_INDENT_2).decode()
                )
            case _:
                click.echo(f"{name} {done}{self.suffix}")
        self.count += 1

    def gone(self, name: str, done: str) -> None:
        """Print that an object went; among documents there is no place for it, so that goes to stderr."""
        text = name if self.output == "name" else f"{name} {done}{self.suffix}"
        click.echo(text, err=self.output in ("yaml", "json"))


def _without_managed_fields(tree: dict[str, Tree]) -> dict[str, Tree]:
    """Return the object without who wrote what, as `fleetctl get -o yaml` shows it."""
    metadata = tree["metadata"]
    assert isinstance(metadata, dict)
    kept = {key: value for key, value in metadata.items() if key != "managedFields"}
    return {**tree, "metadata": kept}

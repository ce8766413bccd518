"""`fleetctl create`: creates objects from manifests (-f) or, for some kinds, from flags."""

import sys
from collections.abc import Mapping
from typing import Any

import click
from click.core import ParameterSource
from typing_extensions import override

from fleetctl.cli.arguments import (
    manager_option,
    manifests_option,
    recursive_option,
    result_options,
)
from fleetctl.cli.connect import open_store, run, store_options
from fleetctl.cli.errors import FleetctlError
from fleetctl.cli.spellings import KIND_SYNONYMS
from fleetctl.objects.results import ResultPrinter
from fleetctl.objects.writer import create_all
from fleetctl.verbs import create_flags
from fleetctl.verbs.create_apikey import apikey
from fleetctl.verbs.create_externalkey import externalkey
from fleetctl.verbs.create_hubtoken import hubtoken
from machinery.clock import SystemClock
from manifests.errors import ManifestErrors
from manifests.load import LoadedObject, load_objects
from manifests.suggestions import nearest
from schemas import kinds

_HELP = """Create objects from manifests with -f, or from flags. Existing objects are an error.

\b
  fleetctl create -f qwen.yaml
  fleetctl create modeldeployment qwen --model=Qwen3-8B-4bit --replicas=2
  fleetctl create nodepool studio --node=mac-1 --node=mac-2 --dry-run=client -o yaml > studio.yaml
  KEY=$(fleetctl create apikey ci)

`fleetctl apply` creates objects as well, and changes existing ones.
"""


class _KindGroup(click.Group):
    """Subcommands that are found by the name or an alias of their kind, such as md."""

    @override
    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        kind = kinds.by_alias(cmd_name)
        return super().get_command(ctx, cmd_name if kind is None else kind.name.lower())

    @override
    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        kind = kinds.by_alias(args[0])
        if kind is None and args[0] not in self.commands:
            synonym = KIND_SYNONYMS.get(args[0].lower(), "").removesuffix("s")
            known = [*self.commands, "shardgroup", "gitsource"]
            near = synonym if synonym in known else nearest(args[0], known)
            hint = f"; did you mean {near}?" if near else f"; available: {', '.join(self.commands)}"
            ctx.fail(f"unknown kind {args[0]!r}{hint}")
        if kind is not None and kind.name.lower() not in self.commands:
            if not kind.written_by_users:
                ctx.fail(f"{kind.plural} are created by the fleet only")
            ctx.fail(
                f"a {kind.name} cannot be created from flags; write a manifest, and run: fleetctl create -f FILE. "
                f"`fleetctl explain {kind.name.lower()}` describes its fields"
            )
        return super().resolve_command(ctx, args)


@click.group(
    cls=_KindGroup,
    help=_HELP,
    invoke_without_command=True,
    subcommand_metavar="[KIND NAME [OPTIONS]]",
)
@manifests_option(is_required=False)
@recursive_option
@manager_option
@result_options
@store_options
@click.pass_context
def create(context: click.Context, /, files: tuple[str, ...], **options: Any) -> None:
    """Create objects from manifests or from flags."""
    if context.invoked_subcommand is not None:
        # Refuse flags between `create` and the kind, which would be ignored.
        for param in context.command.params:
            is_given = context.get_parameter_source(param.name or "") is ParameterSource.COMMANDLINE
            if is_given and param.name == "files":
                raise click.UsageError("give -f, or a kind with flags, but not both")
            if is_given:
                kind = context.invoked_subcommand
                raise click.UsageError(
                    f"write {param.opts[-1]} after the kind: create {kind} NAME ..."
                )
        return
    if not files:
        raise click.UsageError("what to create? Give -f FILE, or KIND NAME with flags")
    try:
        recursive = options["recursive"]
        loaded = load_objects(files, recursive=recursive, stdin=sys.stdin.buffer)
    except ManifestErrors as error:
        raise FleetctlError(f"nothing was created:\n{error}") from error
    create_objects(loaded, options, {})


def create_objects(
    loaded: list[LoadedObject], options: dict[str, Any], flags: Mapping[str, str]
) -> None:
    """Create objects; `flags` maps fields to the flags that set them, for errors about objects made from flags."""
    results = ResultPrinter.of(options)
    if results.dry_run == "client":
        for item in loaded:
            results.print_declared(item.obj, "created")
        return
    try:
        run(_create(loaded, results, options))
    except ManifestErrors as error:
        problems = create_flags.problems_in_flags(error, flags) if flags else str(error)
        raise FleetctlError(f"nothing was created:\n{problems}") from error


async def _create(
    loaded: list[LoadedObject], results: ResultPrinter, options: dict[str, Any]
) -> None:
    async with open_store(options) as transport:
        await create_all(
            transport,
            loaded,
            SystemClock(),
            manager=options["manager"],
            report=lambda obj: results.print_object(obj, "created"),
            is_dry=results.is_dry,
        )


create.add_command(apikey)
create.add_command(externalkey)
create.add_command(hubtoken)
for command in create_flags.kind_commands(create_objects):
    create.add_command(command)

"""`fleetctl get`: objects as tables, YAML, JSON, names or what a template makes of them; with -w as they change."""

from collections.abc import Callable
from functools import partial
from typing import Any

import click

from fleetctl.cli import connect
from fleetctl.cli.connect import run, store_options
from fleetctl.cli.errors import FleetctlError
from fleetctl.cli.kubectl_hints import unsupported_flag
from fleetctl.objects import query
from fleetctl.objects.kind_args import API_KEYS
from fleetctl.objects.query import ObjectQuery
from fleetctl.output import formats
from fleetctl.output.render import ObjectRenderer
from machinery.clock import SystemClock

_NO_NAMESPACES = (
    "fleets have no namespaces; a fleet in a shared etcd has its own --etcd-prefix. Leave out"
)


def _no_namespaces(_: click.Context, parameter: click.Parameter, value: Any) -> None:
    """Refuse what kubectl's users type without thinking."""
    if value:
        raise click.UsageError(f"{_NO_NAMESPACES} {parameter.opts[0]}")


# The last is shown first.
_OPTIONS: tuple[Callable[..., Any], ...] = (
    click.option("-n", "--namespace", expose_value=False, hidden=True, callback=_no_namespaces),
    click.option(
        *("-A", "--all-namespaces"),
        is_flag=True,
        expose_value=False,
        hidden=True,
        callback=_no_namespaces,
    ),
    unsupported_flag(
        "long lists are read in pages by themselves; leave it out", "--chunk-size", takes_value=True
    ),
    click.option("--ignore-not-found", is_flag=True, help="Names that nobody has are no error."),
    click.option(
        "--show-managed-fields",
        is_flag=True,
        help="With -o yaml or json, also who wrote which field.",
    ),
    click.option("--show-kind", is_flag=True, help="Write the kind before each name."),
    click.option("--no-headers", is_flag=True, help="Leave out the line of titles."),
    click.option(
        *("-L", "--label-columns"),
        multiple=True,
        metavar="KEY,...",
        help="A column for each of these labels.",
    ),
    click.option("--show-labels", is_flag=True, help="A column with all labels."),
    click.option(
        "--output-watch-events",
        is_flag=True,
        help="With -w, say of each line whether it was ADDED, MODIFIED or DELETED.",
    ),
    click.option("--watch-only", is_flag=True, help="As -w, without what is there already."),
    click.option("-w", "--watch", is_flag=True, help="Go on, and show what changes."),
    click.option(
        "--sort-by",
        default="",
        metavar="PATH",
        help="In the order of a field (JSONPath): .metadata.creationTimestamp.",
    ),
    click.option(
        "--field-selector",
        default="",
        help="Only objects with these fields: metadata.name=x,spec.node!=y.",
    ),
    click.option(
        *("-l", "--selector"),
        default="",
        help="Only objects with these labels: k=v,k!=v,k in (a,b),k,!k.",
    ),
    click.option(
        *("-R", "--recursive"), is_flag=True, help="With -f: folders with all below them."
    ),
    click.option(
        *("-f", "--filename", "files"),
        multiple=True,
        help="The objects that are in these manifests.",
    ),
    click.option("-o", "--output", default="table", metavar="FORMAT", help=f"Print {formats.HELP}"),
)


def _get_options(command: Callable[..., Any]) -> Callable[..., Any]:
    for option in _OPTIONS:
        command = option(command)
    return command


_HELP = """Show objects.

\b
  fleetctl get nodes
  fleetctl get md,rep -o wide
  fleetctl get md/qwen node/mac-1 -o yaml
  fleetctl get -f manifests/ -o wide
  fleetctl get replicas -w
  fleetctl get nodes -o jsonpath='{range .items[*]}{.metadata.name}{"\\n"}{end}'
  fleetctl get md -o custom-columns=NAME:.metadata.name,MODEL:.spec.model.path

KIND may be singular, plural or short: md, np, sg, mr, gs, no, rep, ep, rev, ev, ft; API keys: apikeys; `all` is
all of them but revisions, events, fabric tests and API keys.
"""


@click.command(help=_HELP)
@click.argument("what", nargs=-1, metavar="[KIND[,KIND...] [NAME...] | KIND/NAME...]")
@_get_options
@store_options
def get(what: tuple[str, ...], **options: Any) -> None:
    """Show objects."""
    wanted = query.parse(what, options)
    shown = ObjectRenderer(wanted, options)
    if options["watch"] or options["watch_only"]:
        _watch(wanted, shown, options)
        return
    if options["output_watch_events"]:
        raise click.UsageError("--output-watch-events is for -w")
    clock = SystemClock()
    seen = connect.read_once(options, partial(query.fetch, clock=clock, asked=wanted))
    if seen.trees or not (seen.missing or shown.nothing()):
        click.echo(shown.all(seen), nl=False)
    elif not seen.missing:
        click.echo(shown.nothing(), err=True)
    if seen.missing and not options["ignore_not_found"]:
        raise FleetctlError("\nerror: ".join(seen.missing))


def _watch(wanted: ObjectQuery, shown: ObjectRenderer, options: dict[str, Any]) -> None:
    from fleetctl.verbs.get_watch import watch  # noqa: PLC0415 - only for --watch

    if wanted.has_several_kinds:
        raise click.UsageError("one kind can be watched at a time; name one, or leave out -w")
    if any(target.kind is API_KEYS for target in wanted.targets):
        raise click.UsageError("API keys cannot be watched; leave out -w")
    is_silent = bool(options["watch_only"])
    run(watch(wanted, shown, SystemClock(), options, is_silent_at_first=is_silent))

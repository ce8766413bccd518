"""Which words fit which argument: kinds, names of objects, fields, contexts. Says nothing when the store does not."""

from collections.abc import Callable, Sequence

import click
from click.shell_completion import CompletionItem
from typing_extensions import override

from fleetctl.config.reading import read
from fleetctl.config.settling import config_path
from fleetctl.kinds import API_KEYS, is_api_keys
from schemas import kinds
from store.errors import StoreError, UndecodableError

Item = CompletionItem[str]

# Arguments that take names of one kind, by what help calls them or by their own name.
_KIND_OF = {
    "NODE": "Node", "SOURCE": "GitSource", "GROUP": "ShardGroup", "MODEL": "ModelDeployment",
    "REPLICA": "Replica",
}  # fmt: skip
# Verbs whose NAME is a deployment's.
_ABOUT_DEPLOYMENTS = ("rollout",)
# Verbs that take API keys like objects.
_WITH_API_KEYS = ("get", "describe", "delete")


class Words(click.ParamType[str]):
    """Text of which somebody knows what it may be."""

    name = "text"

    def __init__(self, known: Callable[[click.Context, str], list[Item]]) -> None:
        self._known = known

    @override
    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[Item]:
        try:
            return [
                item for item in self._known(ctx, incomplete) if item.value.startswith(incomplete)
            ]
        except (click.ClickException, StoreError, UndecodableError, OSError):
            # A completion that says why it has none would stand in the middle of what is typed.
            return []


def dress(root: click.Command, words: Sequence[str]) -> bool:
    """Tell the parameters of the command that the words lead to what may stand there; False if they lead nowhere."""
    path: list[str] = []
    command, is_value = root, False
    for word in words:
        if not isinstance(command, click.Group):
            break
        if is_value or word.startswith("-"):
            is_value = not is_value and _takes_value(command, word)
            continue
        found = command.get_command(click.Context(command), word)
        if found is None:
            return False
        command, path = found, [*path, word]
    for parameter in (*root.params, *command.params):
        _dress(parameter, path)
    return True


def _takes_value(command: click.Command, word: str) -> bool:
    """Return whether the next word is the value of a flag."""
    return any(
        word in parameter.opts and not (isinstance(parameter, click.Option) and parameter.is_flag)
        for parameter in command.params
    )


def _dress(parameter: click.Parameter, path: Sequence[str]) -> None:
    if parameter.name == "context":
        parameter.type = Words(_contexts)
    elif isinstance(parameter, click.Argument):
        known = _of_argument(parameter, path)
        parameter.type = parameter.type if known is None else Words(known)
    elif {"-f", "--filename", "--config"} & set(parameter.opts):
        parameter.type = click.Path()
    elif "--for" in parameter.opts and path[:1] == ["wait"]:
        parameter.type = Words(_goals)
    elif "--output" in parameter.opts and path[:1] == ["get"]:
        parameter.type = Words(_outputs)


def _of_argument(
    argument: click.Argument, path: Sequence[str]
) -> Callable[[click.Context, str], list[Item]] | None:
    """Return who knows what the argument may be; None if its own type does, or nobody."""
    told = (argument.metavar or argument.name or "").upper()
    if path[:1] == ["config"] and argument.name in ("name", "old"):
        return _contexts
    if path[:1] == ["explain"]:
        return _explained if argument.name == "what" else _names_of("ModelDeployment")
    if path[:1] == ["logs"]:
        return _logged
    if "KIND" in told:
        return _objects
    if path[:1] and path[0] in _ABOUT_DEPLOYMENTS:
        return _names_of("ModelDeployment")
    first = told.strip("[]. ").split(".")[0].split(" ")[0]
    return _names_of(_KIND_OF[first]) if first in _KIND_OF else None


def _contexts(ctx: click.Context, _: str) -> list[Item]:
    found = read(config_path(ctx))
    return [CompletionItem(name) for name in sorted(found.contexts)]


def _outputs(_: click.Context, __: str) -> list[Item]:
    templates = ("jsonpath=", "jsonpath-file=", "custom-columns=", "custom-columns-file=")
    return [CompletionItem(one) for one in ("json", "yaml", "wide", "name", *templates)]


def _goals(_: click.Context, incomplete: str) -> list[Item]:
    if incomplete.startswith("condition="):
        types = ("Accepted", "Available", "Placed", "Progressing", "Ready")
        return [CompletionItem(f"condition={one}") for one in types]
    return [CompletionItem(one) for one in ("condition=", "jsonpath=", "create", "delete")]


def _explained(_: click.Context, incomplete: str) -> list[Item]:
    """Return kinds and `placement`; behind a dot, the fields."""
    if "." not in incomplete:
        shown = [kind.name.lower() for kind in kinds.KINDS]
        return [CompletionItem(one) for one in sorted([*shown, "placement"])]
    from fleetctl import explain_schema  # noqa: PLC0415 - the schemas, for fields alone

    head = incomplete.rpartition(".")[0]
    word, *path = head.split(".")
    model = explain_schema.model_of(word)
    fields = model.fields(explain_schema.find(model, tuple(path)).schema)
    return [CompletionItem(f"{head}.{one.name}", help=one.description) for one in fields]


def _objects(ctx: click.Context, incomplete: str) -> list[Item]:
    """Return kinds; behind `KIND/` or a kind's word, the names of its objects."""
    told = _argument_words(ctx)
    kind_word, slash, _ = incomplete.partition("/")
    if slash:
        return [
            CompletionItem(f"{kind_word}/{item.value}", help=item.help)
            for item in _named(ctx, kind_word)
        ]
    if told and "/" not in told[0]:
        return [item for item in _named(ctx, told[0]) if item.value not in told[1:]]
    if told:
        return []
    known = [*kinds.KINDS, API_KEYS] if _takes_api_keys(ctx) else kinds.KINDS
    return [CompletionItem(kind.plural, help=kind.short) for kind in known]


def _takes_api_keys(ctx: click.Context) -> bool:
    """Return whether the verb takes API keys: the one that was typed, for which `get` may stand in."""
    return ctx.find_root().obj in _WITH_API_KEYS


def _argument_words(ctx: click.Context) -> tuple[str, ...]:
    """Return the words of the command's first argument so far."""
    for parameter in ctx.command.params:
        if isinstance(parameter, click.Argument) and parameter.nargs == -1:
            return tuple(ctx.params.get(parameter.name or "") or ())
    return ()


def _names_of(kind: str) -> Callable[[click.Context, str], list[Item]]:
    def known(ctx: click.Context, _: str) -> list[Item]:
        told = _argument_words(ctx)
        return [item for item in _named(ctx, kind) if item.value not in told]

    return known


def _logged(ctx: click.Context, incomplete: str) -> list[Item]:
    """Return what has a log: replicas, and others by their kind."""
    head, slash, _ = incomplete.partition("/")
    if slash:
        return [CompletionItem(f"{head}/{item.value}") for item in _named(ctx, head)]
    others = [CompletionItem(one) for one in ("deploy/", "gateway/", "node/", "replica/")]
    return [*_named(ctx, "Replica"), *others]


def _named(ctx: click.Context, word: str) -> list[Item]:
    """Return the names of a kind's objects in the store that the line means."""
    from fleetctl.completion import asking  # noqa: PLC0415 - only where the store is asked

    is_keys = _takes_api_keys(ctx) and is_api_keys(word)
    known = API_KEYS if is_keys else kinds.by_alias({"deploy": "modeldeployment"}.get(word, word))
    kind = "Gateway" if word in ("gateway", "gateways") else known.name if known else ""
    return (
        [CompletionItem(name) for name in asking.names(ctx, dict(ctx.params), kind)] if kind else []
    )

"""What shells are told: scripts that ask `fleetctl __complete SHELL LINE` and show its answer.

The answer has one line for each candidate: what it is (plain, file, dir), its text and what it means, with tabs between.

The names of objects, asked of the store that a half-typed line means.

Which words fit which argument: kinds, names of objects, fields, contexts. Says nothing when the store does not.

What may stand at the end of a command line, told as the scripts want to hear it.

`fleetctl completion`: the script for the user's shell; and the hidden verb that the scripts ask.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import click
from click.shell_completion import CompletionItem, ShellComplete, split_arg_string
from typing_extensions import override

from fleetctl.cli.connect import etcd_address
from fleetctl.cli.contexts import load
from fleetctl.cli.resolve import config_path, resolve_options
from fleetctl.objects.kind_args import API_KEYS, is_api_keys
from machinery.clock import SystemClock
from schemas import kinds
from store import keys, object_trees
from store.errors import StoreError, UndecodableError
from store.etcd.sync_reader import SyncReader, run_sync

# Without bash-completion, and for bash 3.2, which is what macOS has: no `compopt` there, and no `complete -o nosort`.
# Who answers puts the blank behind what is whole.
BASH = r"""# fleetctl completion for bash. Add to ~/.bashrc: source <(fleetctl completion bash)
_fleetctl() {
    local kind value meaning word="${COMP_WORDS[COMP_CWORD]}"
    COMPREPLY=()
    while IFS=$'\t' read -r kind value meaning; do
        case "$kind" in
            plain) COMPREPLY+=("$value") ;;
            whole) COMPREPLY+=("$value ") ;;
            file)
                compopt -o filenames +o nospace 2>/dev/null
                while IFS= read -r value; do COMPREPLY+=("$value"); done < <(compgen -f -- "$word")
                ;;
            dir)
                compopt -o filenames 2>/dev/null
                while IFS= read -r value; do COMPREPLY+=("$value"); done < <(compgen -d -- "$word")
                ;;
        esac
    done < <("$1" __complete bash "${COMP_LINE:0:$COMP_POINT}" 2>/dev/null)
}
complete -o nospace -F _fleetctl fleetctl
"""

ZSH = r"""#compdef fleetctl
# fleetctl completion for zsh. Add to ~/.zshrc, after compinit: source <(fleetctl completion zsh)
_fleetctl() {
    local line kind value meaning
    local -a whole open
    for line in "${(@f)$("${words[1]}" __complete zsh "${(j: :)words[1,CURRENT]}" 2>/dev/null)}"; do
        kind="${line%%$'\t'*}"
        value="${${line#*$'\t'}%%$'\t'*}"
        meaning="${line##*$'\t'}"
        case "$kind" in
            plain) open+=("${value//:/\\:}${meaning:+:$meaning}") ;;
            whole) whole+=("${value//:/\\:}${meaning:+:$meaning}") ;;
            file) _files ;;
            dir) _files -/ ;;
        esac
    done
    (( $#whole )) && _describe -V fleetctl whole
    (( $#open )) && _describe -V fleetctl open -S ''
    return 0
}
if [[ "${zsh_eval_context[-1]}" == loadautofunc ]]; then
    _fleetctl "$@"
else
    compdef _fleetctl fleetctl
fi
"""

# fish itself leaves the blank out behind what ends with '/', '=', '.' or ','.
FISH = r"""# fleetctl completion for fish. Do: fleetctl completion fish > ~/.config/fish/completions/fleetctl.fish
function __fleetctl_complete
    set -l command (commandline -poc)[1]
    for line in ($command __complete fish (commandline -cp | string collect) 2>/dev/null)
        set -l parts (string split \t -- $line)
        switch $parts[1]
            case plain whole
                printf '%s\t%s\n' $parts[2] "$parts[3]"
            case file
                __fish_complete_path (commandline -ct)
            case dir
                __fish_complete_directories (commandline -ct)
        end
    end
end
complete -c fleetctl -f -a '(__fleetctl_complete)'
"""

SCRIPTS = {"bash": BASH, "zsh": ZSH, "fish": FISH}


_STORE_OPTIONS = ("data_dir", "etcd", "etcd_ca", "etcd_cert", "etcd_key", "etcd_user", "etcd_password",
          "etcd_password_file", "etcd_prefix", "etcd_transport")  # fmt: skip


def object_names(context: click.Context, options: dict[str, Any], kind: str) -> list[str]:
    """Return the names of a kind's objects; of `Gateway`, the ids of those that are registered.

    Raises:
        click.ClickException: the line names no store.
        StoreError: it does not answer.

    """
    if any(name not in options for name in _STORE_OPTIONS):
        return []
    with context.scope(cleanup=False):
        said = resolve_options(
            {name: options[name] for name in _STORE_OPTIONS}, options.get("context")
        )
        address = etcd_address(said)
    store = SyncReader(address, SystemClock())
    try:
        if kind == "Gateway":
            items = run_sync(store.list(keys.GATEWAY_LEASE_PREFIX)).items
            return [item.key.removeprefix(keys.GATEWAY_LEASE_PREFIX) for item in items]
        return sorted(
            {object_trees.name_of(t) for t in run_sync(object_trees.list_all(store, kind))}
        )
    finally:
        store.close()


CandidateItem = CompletionItem[str]

# Arguments that take names of one kind, by what help calls them or by their own name.
_KIND_OF = {
    "NODE": "Node", "SOURCE": "GitSource", "GROUP": "ShardGroup", "MODEL": "ModelDeployment",
    "REPLICA": "Replica",
}  # fmt: skip
# Verbs whose NAME is a deployment's.
_ABOUT_DEPLOYMENTS = ("rollout",)
# Verbs that take API keys like objects.
_WITH_API_KEYS = ("get", "describe", "delete")


class CandidateType(click.ParamType[str]):
    """Text of which somebody knows what it may be."""

    name = "text"

    def __init__(self, known: Callable[[click.Context, str], list[CandidateItem]]) -> None:
        self._known = known

    @override
    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CandidateItem]:
        try:
            return [
                item for item in self._known(ctx, incomplete) if item.value.startswith(incomplete)
            ]
        except (click.ClickException, StoreError, UndecodableError, OSError):
            # A completion that says why it has none would stand in the middle of what is typed.
            return []


def set_candidate_types(root: click.Command, words: Sequence[str]) -> bool:
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
        _set_candidate_type(parameter, path)
    return True


def _takes_value(command: click.Command, word: str) -> bool:
    """Return whether the next word is the value of a flag."""
    return any(
        word in parameter.opts and not (isinstance(parameter, click.Option) and parameter.is_flag)
        for parameter in command.params
    )


def _set_candidate_type(parameter: click.Parameter, path: Sequence[str]) -> None:
    if parameter.name == "context":
        parameter.type = CandidateType(_contexts)
    elif isinstance(parameter, click.Argument):
        known = _of_argument(parameter, path)
        parameter.type = parameter.type if known is None else CandidateType(known)
    elif {"-f", "--filename", "--config"} & set(parameter.opts):
        parameter.type = click.Path()
    elif "--for" in parameter.opts and path[:1] == ["wait"]:
        parameter.type = CandidateType(_wait_conditions)
    elif "--output" in parameter.opts and path[:1] == ["get"]:
        parameter.type = CandidateType(_outputs)


def _of_argument(
    argument: click.Argument, path: Sequence[str]
) -> Callable[[click.Context, str], list[CandidateItem]] | None:
    """Return who knows what the argument may be; None if its own type does, or nobody."""
    told = (argument.metavar or argument.name or "").upper()
    if path[:1] == ["config"] and argument.name in ("name", "old"):
        return _contexts
    if path[:1] == ["explain"]:
        return _explain_targets if argument.name == "what" else _names_of("ModelDeployment")
    if path[:1] == ["logs"]:
        return _log_targets
    if "KIND" in told:
        return _objects
    if path[:1] and path[0] in _ABOUT_DEPLOYMENTS:
        return _names_of("ModelDeployment")
    first = told.strip("[]. ").split(".")[0].split(" ")[0]
    return _names_of(_KIND_OF[first]) if first in _KIND_OF else None


def _contexts(ctx: click.Context, _: str) -> list[CandidateItem]:
    found = load(config_path(ctx))
    return [CompletionItem(name) for name in sorted(found.contexts)]


def _outputs(_: click.Context, __: str) -> list[CandidateItem]:
    templates = ("jsonpath=", "jsonpath-file=", "custom-columns=", "custom-columns-file=")
    return [CompletionItem(one) for one in ("json", "yaml", "wide", "name", *templates)]


def _wait_conditions(_: click.Context, incomplete: str) -> list[CandidateItem]:
    if incomplete.startswith("condition="):
        types = ("Accepted", "Available", "Placed", "Progressing", "Ready")
        return [CompletionItem(f"condition={one}") for one in types]
    return [CompletionItem(one) for one in ("condition=", "jsonpath=", "create", "delete")]


def _explain_targets(_: click.Context, incomplete: str) -> list[CandidateItem]:
    """Return kinds and `placement`; behind a dot, the fields."""
    if "." not in incomplete:
        shown = [kind.name.lower() for kind in kinds.KINDS]
        return [CompletionItem(one) for one in sorted([*shown, "placement"])]
    from fleetctl.objects import kind_schema  # noqa: PLC0415 - the schemas, for fields alone

    head = incomplete.rpartition(".")[0]
    word, *path = head.split(".")
    model = kind_schema.schema_of(word)
    fields = model.fields(kind_schema.find_field(model, tuple(path)).schema)
    return [CompletionItem(f"{head}.{one.name}", help=one.description) for one in fields]


def _objects(ctx: click.Context, incomplete: str) -> list[CandidateItem]:
    """Return kinds; behind `KIND/` or a kind's word, the names of its objects."""
    told = _argument_words(ctx)
    kind_word, slash, _ = incomplete.partition("/")
    if slash:
        return [
            CompletionItem(f"{kind_word}/{item.value}", help=item.help)
            for item in _object_items(ctx, kind_word)
        ]
    if told and "/" not in told[0]:
        return [item for item in _object_items(ctx, told[0]) if item.value not in told[1:]]
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


def _names_of(kind: str) -> Callable[[click.Context, str], list[CandidateItem]]:
    def known(ctx: click.Context, _: str) -> list[CandidateItem]:
        told = _argument_words(ctx)
        return [item for item in _object_items(ctx, kind) if item.value not in told]

    return known


def _log_targets(ctx: click.Context, incomplete: str) -> list[CandidateItem]:
    """Return what has a log: replicas, and others by their kind."""
    head, slash, _ = incomplete.partition("/")
    if slash:
        return [CompletionItem(f"{head}/{item.value}") for item in _object_items(ctx, head)]
    others = [CompletionItem(one) for one in ("deploy/", "gateway/", "node/", "replica/")]
    return [*_object_items(ctx, "Replica"), *others]


def _object_items(ctx: click.Context, word: str) -> list[CandidateItem]:
    """Return the names of a kind's objects in the store that the line means."""
    is_keys = _takes_api_keys(ctx) and is_api_keys(word)
    known = API_KEYS if is_keys else kinds.by_alias({"deploy": "modeldeployment"}.get(word, word))
    kind = "Gateway" if word in ("gateway", "gateways") else known.name if known else ""
    return (
        [CompletionItem(name) for name in object_names(ctx, dict(ctx.params), kind)] if kind else []
    )


# Verbs that take kinds and names as `get` does, or names of one kind: `get` imports the least, and completes for all
# of them while no flag was typed.
_LIKE_GET: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(
        ("annotate", "delete", "describe", "edit", "label", "patch", "scale", "wait"), ()
    ),
    **dict.fromkeys(("cordon", "drain", "uncordon"), ("nodes",)),
    "chat": ("modeldeployments",),
    "sync": ("gitsources",),
}
# Behind these something must follow, so that no blank does.
_OPEN = ("/", "=", ".", ",", ":")


def candidate_lines(root: click.Command, shell: str, line: str) -> Iterator[str]:
    """Yield a line for each candidate."""
    words, incomplete = split(line)
    for found in complete(root, words, incomplete):
        kind = found.type
        if kind == "plain" and not found.value.endswith(_OPEN):
            kind = "whole"
        value = _last_word_part(found.value, incomplete) if shell == "bash" else found.value
        meaning = " ".join((found.help or "").split())
        yield f"{kind}\t{value}\t{meaning}\n"


def split(line: str) -> tuple[list[str], str]:
    """Return the whole words behind the command's name, and the one that is being typed ("" at a blank)."""
    words = split_arg_string(line)[1:]
    is_between = not words or (line[-1:].isspace() and not line.endswith("\\ "))
    return (words, "") if is_between else (words[:-1], words[-1])


def complete(
    root: click.Command, words: Sequence[str], incomplete: str
) -> list[CompletionItem[str]]:
    """Return the candidates for the word behind whole words."""
    words = list(words)
    flag, equals, typed = incomplete.partition("=")
    joined = f"{flag}=" if equals and flag.startswith("--") else ""
    if joined:
        words, incomplete = [*words, flag], typed
    meant = next((word for word in words if not word.startswith("-")), "")
    if not any(word.startswith("-") for word in (*words, incomplete)):
        words = _as_get_line(words)
    if not set_candidate_types(root, words):
        return []
    found = ShellComplete(root, {"obj": meant}, "fleetctl", "").get_completions(words, incomplete)
    for item in found:
        if joined and item.type == "plain":
            item.value = joined + item.value
    return found


def _as_get_line(words: list[str]) -> list[str]:
    """Return a line of `get` that is completed in the same way, if there is one."""
    if words[:1] == ["rollout"] and len(words) > 1:
        return ["get", "modeldeployments", *words[2:]]
    kind = _LIKE_GET.get(words[0]) if words else None
    return words if kind is None else ["get", *kind, *words[1:]]


def _last_word_part(value: str, incomplete: str) -> str:
    """Return what bash takes for the word: it begins a new one behind '=' and ':' (COMP_WORDBREAKS)."""
    cut = max(incomplete.rfind("="), incomplete.rfind(":")) + 1
    return value[cut:] if value.startswith(incomplete[:cut]) else value


_HELP = """Print a script that completes verbs, flags, kinds, names of objects and contexts in your shell.

\b
  bash:  echo 'source <(fleetctl completion bash)' >> ~/.bashrc
  zsh:   echo 'source <(fleetctl completion zsh)' >> ~/.zshrc    (after compinit)
  fish:  fleetctl completion fish > ~/.config/fish/completions/fleetctl.fish

Names of objects are asked of the store that the line means (--context, --etcd, ...), for two seconds at most.
"""


@click.command(help=_HELP)
@click.argument("shell", type=click.Choice(sorted(SCRIPTS)))
def completion(shell: str) -> None:
    """Print a script that completes verbs, flags, kinds and names in your shell."""
    click.echo(SCRIPTS[shell], nl=False)


@click.command("__complete", hidden=True)
@click.argument("shell", type=click.Choice(sorted(SCRIPTS)))
@click.argument("line")
def answer(shell: str, line: str) -> None:
    """Say what may stand at the end of a line; for the scripts."""
    root = click.get_current_context().find_root().command
    click.echo("".join(candidate_lines(root, shell, line)), nl=False)

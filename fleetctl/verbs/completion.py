"""The verb `fleetctl completion`: shell scripts, and the hidden verb `__complete` that answers them.

A script runs `fleetctl __complete SHELL LINE`. The answer has one line per candidate: its type (plain, whole, file,
dir), its text and its meaning, separated by tabs. Without an answer from the store, there are no object names.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import click
from click.shell_completion import CompletionItem, ShellComplete, split_arg_string
from typing_extensions import override

from fleetctl.cli.contexts import load
from fleetctl.cli.errors import program_name
from fleetctl.cli.resolve import config_path, resolve_options
from fleetctl.cli.spellings import KIND_SYNONYMS
from fleetctl.objects.kind_args import API_KEYS, is_api_keys
from schemas import kinds
from store.errors import StoreError, UndecodableError

# For bash 3.2 of macOS and without bash-completion: no `compopt` there, and no `complete -o nosort`.
# `__complete` itself adds the space after a whole word.
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

# fish adds no space after '/', '=', '.' or ','.
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
# The program, not the functions of the scripts: these may be loaded under both names of the program.
_PROGRAM = re.compile(r"(?<!\w)fleetctl")


_STORE_OPTIONS = ("data_dir", "etcd", "etcd_ca", "etcd_cert", "etcd_key", "etcd_user", "etcd_password",
          "etcd_password_file", "etcd_prefix", "etcd_transport")  # fmt: skip
# A shell waits for the answer to its Tab.
_PATIENCE_S = 3.0


def object_names(context: click.Context, options: dict[str, Any], kind: str) -> list[str]:
    """Return the names of a kind's objects; for `Gateway`, the ids of registered gateways.

    Raises:
        click.ClickException: the line names no store.
        TimeoutError: the store does not answer.

    """
    # Imported here, because most completions need no store.
    import asyncio  # noqa: PLC0415 - see above

    from fleetctl.cli.connect import open_store, run  # noqa: PLC0415 - see above
    from store import keys, object_trees  # noqa: PLC0415 - see above

    if any(name not in options for name in _STORE_OPTIONS):
        return []
    with context.scope(cleanup=False):
        resolved = resolve_options(
            {name: options[name] for name in _STORE_OPTIONS}, options.get("context")
        )

    async def read() -> list[str]:
        async with asyncio.timeout(_PATIENCE_S), open_store(resolved, is_recorded=False) as store:
            if kind == "Gateway":
                items = (await store.list(keys.GATEWAY_LEASE_PREFIX)).items
                return [item.key.removeprefix(keys.GATEWAY_LEASE_PREFIX) for item in items]
            return sorted({*map(object_trees.name_of, await object_trees.list_all(store, kind))})

    return run(read())


CandidateItem = CompletionItem[str]

# Arguments that take names of one kind, by metavar or argument name.
_KIND_OF_ARGUMENT = {
    "NODE": "Node", "SOURCE": "GitSource", "GROUP": "ShardGroup", "MODEL": "ModelDeployment",
    "REPLICA": "Replica",
}  # fmt: skip
# Verbs whose NAME is a deployment.
_DEPLOYMENT_VERBS = ("rollout",)
# Verbs that accept API keys as a kind.
_API_KEY_VERBS = ("get", "describe", "delete", "rotate")


class CandidateType(click.ParamType[str]):
    """Parameter type that offers candidates."""

    name = "text"

    def __init__(self, candidates: Callable[[click.Context, str], list[CandidateItem]]) -> None:
        self._candidates = candidates

    @override
    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CandidateItem]:
        try:
            return [
                item
                for item in self._candidates(ctx, incomplete)
                if item.value.startswith(incomplete)
            ]
        except (click.ClickException, StoreError, UndecodableError, OSError):
            # An error message would end up in the middle of the user's command line.
            return []


def set_candidate_types(root: click.Command, words: Sequence[str]) -> bool:
    """Set candidate types on the parameters of the command that the words name; return False if there is none."""
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
        if parameter.name == "context":
            parameter.type = CandidateType(_contexts)
        elif isinstance(parameter, click.Argument):
            candidates = _argument_candidates(parameter, path)
            parameter.type = parameter.type if candidates is None else CandidateType(candidates)
        elif {"-f", "--filename", "--config"} & set(parameter.opts):
            parameter.type = click.Path()
        elif isinstance(parameter, click.Option) and parameter.metavar == "KIND/NAME":
            parameter.type = CandidateType(_references)
        elif "--for" in parameter.opts and path[:1] == ["wait"]:
            parameter.type = CandidateType(_wait_conditions)
        elif "--output" in parameter.opts and path[:1] == ["get"]:
            parameter.type = CandidateType(_outputs)
    return True


def _takes_value(command: click.Command, word: str) -> bool:
    """Return whether the next word is the flag's value."""
    return any(
        word in parameter.opts and not (isinstance(parameter, click.Option) and parameter.is_flag)
        for parameter in command.params
    )


def _argument_candidates(
    argument: click.Argument, path: Sequence[str]
) -> Callable[[click.Context, str], list[CandidateItem]] | None:
    """Return the candidates of an argument; None if click's own type knows them, or there are none."""
    metavar = (argument.metavar or argument.name or "").upper()
    if path[:1] == ["config"] and argument.name in ("name", "old"):
        return _contexts
    if path[:1] == ["explain"]:
        return _explain_targets if argument.name == "what" else _names_of("ModelDeployment")
    if path and path[0] in ("logs", "top"):
        return _log_targets if path[0] == "logs" else _measured_objects
    if "KIND" in metavar:
        return _objects
    if path[:1] and path[0] in _DEPLOYMENT_VERBS:
        return _names_of("ModelDeployment")
    first = metavar.strip("[]. ").split(".")[0].split(" ")[0]
    return _names_of(_KIND_OF_ARGUMENT[first]) if first in _KIND_OF_ARGUMENT else None


def _contexts(ctx: click.Context, _: str) -> list[CandidateItem]:
    configuration = load(config_path(ctx))
    return [CompletionItem(name) for name in sorted(configuration.contexts)]


def _outputs(_: click.Context, __: str) -> list[CandidateItem]:
    formats = ("json", "yaml", "wide", "name", "jsonpath=", "custom-columns=")
    return [CompletionItem(format_) for format_ in formats]


def _wait_conditions(_: click.Context, incomplete: str) -> list[CandidateItem]:
    if incomplete.startswith("condition="):
        types = ("Accepted", "Available", "Placed", "Progressing", "Ready")
        return [CompletionItem(f"condition={type_}") for type_ in types]
    return [CompletionItem(one) for one in ("condition=", "jsonpath=", "create", "delete")]


def _explain_targets(_: click.Context, incomplete: str) -> list[CandidateItem]:
    """Return kinds and `placement`; after a dot, the fields."""
    if "." not in incomplete:
        shown = [kind.name.lower() for kind in kinds.KINDS]
        return [CompletionItem(one) for one in sorted([*shown, "placement"])]
    from fleetctl.objects import kind_schema  # noqa: PLC0415 - only fields need the schemas

    head = incomplete.rpartition(".")[0]
    word, *path = head.split(".")
    model = kind_schema.schema_of(word)
    fields = model.fields(kind_schema.find_field(model, tuple(path)).schema)
    return [CompletionItem(f"{head}.{field.name}", help=field.description) for field in fields]


def _objects(ctx: click.Context, incomplete: str) -> list[CandidateItem]:
    """Return kinds; after `KIND/` or a kind, the names of its objects."""
    words = _argument_words(ctx)
    if "/" in incomplete:
        return _references(ctx, incomplete)
    if words and "/" not in words[0]:
        return [item for item in _object_items(ctx, words[0]) if item.value not in words[1:]]
    if words:
        return []
    known = [*kinds.KINDS, API_KEYS] if _takes_api_keys(ctx) else kinds.KINDS
    if ctx.find_root().obj == "rotate":
        known = [API_KEYS]
    if ctx.find_root().obj == "scale":
        known = [kind for kind in known if kind.name == "ModelDeployment"]
    return [CompletionItem(kind.plural, help=kind.short) for kind in known]


def _references(ctx: click.Context, incomplete: str) -> list[CandidateItem]:
    """Return `KIND/` of each kind; after the slash, `KIND/NAME` of its objects."""
    kind_word, slash, _ = incomplete.partition("/")
    if not slash:
        return [CompletionItem(f"{kind.name.lower()}/") for kind in kinds.KINDS]
    return [CompletionItem(f"{kind_word}/{item.value}") for item in _object_items(ctx, kind_word)]


def _measured_objects(ctx: click.Context, incomplete: str) -> list[CandidateItem]:
    """Return what has usage data: `nodes` and `models`, and after one of them the names."""
    if _argument_words(ctx) or "/" in incomplete:
        return _objects(ctx, incomplete)
    return [CompletionItem("nodes"), CompletionItem("models")]


def _takes_api_keys(ctx: click.Context) -> bool:
    """Return whether the typed verb accepts API keys; `get` may complete for another verb."""
    return ctx.find_root().obj in _API_KEY_VERBS


def _argument_words(ctx: click.Context) -> tuple[str, ...]:
    """Return the words of the command's first argument so far."""
    for parameter in ctx.command.params:
        if isinstance(parameter, click.Argument) and parameter.nargs == -1:
            return tuple(ctx.params.get(parameter.name or "") or ())
    return ()


def _names_of(kind: str) -> Callable[[click.Context, str], list[CandidateItem]]:
    def candidates(ctx: click.Context, _: str) -> list[CandidateItem]:
        typed = _argument_words(ctx)
        return [item for item in _object_items(ctx, kind) if item.value not in typed]

    return candidates


def _log_targets(ctx: click.Context, incomplete: str) -> list[CandidateItem]:
    """Return targets with a log: replicas by name, and prefixes of other kinds."""
    head, slash, _ = incomplete.partition("/")
    if slash:
        return [CompletionItem(f"{head}/{item.value}") for item in _object_items(ctx, head)]
    others = [CompletionItem(one) for one in ("gateway/", "md/", "node/", "replica/")]
    return [*_object_items(ctx, "Replica"), *others]


def _object_items(ctx: click.Context, word: str) -> list[CandidateItem]:
    """Return the names of a kind's objects as candidates."""
    is_keys = _takes_api_keys(ctx) and is_api_keys(word)
    known = API_KEYS if is_keys else kinds.by_alias(KIND_SYNONYMS.get(word, word))
    kind = "Gateway" if word in ("gateway", "gateways") else known.name if known else ""
    return (
        [CompletionItem(name) for name in object_names(ctx, dict(ctx.params), kind)] if kind else []
    )


# Verbs with the arguments of `get`: `get` has the fewest imports, so it completes for them until a flag is typed.
_LIKE_GET: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(
        ("annotate", "delete", "describe", "edit", "label", "patch", "scale", "wait"),
        (),
    ),
    "rotate": (),
    **dict.fromkeys(("cordon", "drain", "uncordon"), ("nodes",)),
    **dict.fromkeys(("chat", "run"), ("modeldeployments",)),
    "sync": ("gitsources",),
}
# After these characters, a candidate is incomplete, so no space follows.
_OPEN_ENDS = ("/", "=", ".", ",", ":")


def candidate_lines(root: click.Command, shell: str, line: str) -> Iterator[str]:
    """Yield one line per candidate."""
    words, incomplete = split(line)
    for item in complete(root, words, incomplete):
        kind = item.type
        if kind == "plain" and not item.value.endswith(_OPEN_ENDS):
            kind = "whole"
        value = _last_word_part(item.value, incomplete) if shell == "bash" else item.value
        meaning = " ".join((item.help or "").split())
        yield f"{kind}\t{value}\t{meaning}\n"


def split(line: str) -> tuple[list[str], str]:
    """Return the complete words after the command's name, and the word being typed ("" after a space)."""
    words = split_arg_string(line)[1:]
    starts_new_word = not words or (line[-1:].isspace() and not line.endswith("\\ "))
    return (words, "") if starts_new_word else (words[:-1], words[-1])


def complete(
    root: click.Command, words: Sequence[str], incomplete: str
) -> list[CompletionItem[str]]:
    """Return the candidates for the next word."""
    words = list(words)
    flag, equals, typed = incomplete.partition("=")
    flag_prefix = f"{flag}=" if equals and flag.startswith("--") else ""
    if flag_prefix:
        words, incomplete = [*words, flag], typed
    verb = next((word for word in words if not word.startswith("-")), "")
    if not any(word.startswith("-") for word in (*words, incomplete)):
        words = _as_get_line(words)
    if not set_candidate_types(root, words):
        return []
    completions = ShellComplete(root, {"obj": verb}, "fleetctl", "").get_completions(
        words, incomplete
    )
    for item in completions:
        if flag_prefix and item.type == "plain":
            item.value = flag_prefix + item.value
    return completions


def _as_get_line(words: list[str]) -> list[str]:
    """Return the line of `get` with the same candidates; the line itself if there is none."""
    if words[:1] == ["rollout"] and len(words) > 1:
        return ["get", "modeldeployments", *words[2:]]
    kind = _LIKE_GET.get(words[0]) if words else None
    return words if kind is None else ["get", *kind, *words[1:]]


def _last_word_part(value: str, incomplete: str) -> str:
    """Return the part that bash replaces: it starts a new word after '=' and ':' (COMP_WORDBREAKS)."""
    cut = max(incomplete.rfind("="), incomplete.rfind(":")) + 1
    return value[cut:] if value.startswith(incomplete[:cut]) else value


_HELP = """Print a script that completes verbs, flags, kinds, object names and contexts in your shell.

\b
  bash:  echo 'source <(fleetctl completion bash)' >> ~/.bashrc
  zsh:   echo 'source <(fleetctl completion zsh)' >> ~/.zshrc    (after compinit)
  fish:  fleetctl completion fish > ~/.config/fish/completions/fleetctl.fish

Object names come from the store that the command line names (--context, --etcd, ...), within two seconds.
"""


@click.command(help=_HELP, short_help="Print a script that completes commands in your shell.")
@click.argument("shell", type=click.Choice(sorted(SCRIPTS)))
def completion(shell: str) -> None:
    """Print a script that completes verbs, flags, kinds, object names and contexts in your shell."""
    click.echo(_PROGRAM.sub(program_name(), SCRIPTS[shell]), nl=False)


@click.command("__complete", hidden=True)
@click.argument("shell", type=click.Choice(sorted(SCRIPTS)))
@click.argument("line")
def answer(shell: str, line: str) -> None:
    """Print the candidates for the end of a command line; used by the scripts."""
    root = click.get_current_context().find_root().command
    click.echo("".join(candidate_lines(root, shell, line)), nl=False)

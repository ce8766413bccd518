"""Spellings of kubectl and similar tools: synonyms of verbs and kinds for suggestions, and switches with a value."""

from collections.abc import Sequence

import click

# What users of other tools type. Typing errors are found by their letters.
VERB_SYNONYMS = {
    "cat": "get", "status": "get", "ps": "get", "list": "get get-contexts", "ls": "get get-contexts",
    "remove": "delete", "rm": "delete", "unload": "scale", "load": "scale", "show": "describe", "inspect": "describe",
    "start": "up", "serve": "up", "deploy": "apply", "replace": "apply", "kustomize": "apply", "set": "patch",
    "autoscale": "patch", "prompt": "chat", "ask": "chat", "pull": "models", "search": "models", "quantize": "models",
    "tail": "logs", "journal": "logs", "stats": "top", "check": "doctor", "context": "config", "image": "model",
}  # fmt: skip

# Kinds of Kubernetes, and those that do their job here.
KIND_SYNONYMS = {
    "deployment": "modeldeployments", "deployments": "modeldeployments", "deploy": "modeldeployments",
    "model": "modeldeployments", "models": "modeldeployments",
    "pod": "replicas", "pods": "replicas", "po": "replicas", "rs": "revisions", "replicaset": "revisions",
    "replicasets": "revisions", "service": "modelroutes", "services": "modelroutes", "svc": "modelroutes",
    "ingress": "modelroutes", "ingresses": "modelroutes", "httproute": "modelroutes",
    "kustomization": "gitsources", "gitrepository": "gitsources", "secret": "apikeys", "secrets": "apikeys",
}  # fmt: skip

_NO_NAMESPACES = "fleets have no namespaces: remove the flag"
# Flags of kubectl that no command has, and what to do instead.
_FLAG_ANSWERS = {
    "--server-side": "apply is always a three-way merge by field owner: remove the flag",
    **dict.fromkeys(("-k", "--kustomize"), "use -f DIR, where DIR has an overlay.yaml"),
    **dict.fromkeys(("-n", "--namespace", "-A", "--all-namespaces"), _NO_NAMESPACES),
}

# The booleans of Go's flags.
_BOOLEANS = {
    **dict.fromkeys(("true", "True", "TRUE", "t", "T", "1"), True),
    **dict.fromkeys(("false", "False", "FALSE", "f", "F", "0"), False),
}


def translate_switches(command: click.Command, args: Sequence[str]) -> list[str]:
    """Return a command's arguments with kubectl's `--wait=true` and `--wait=false` in click's spelling.

    True is the switch itself; false is its opposite, such as `--no-wait`, or nothing where there is none.

    Raises:
        click.UsageError: it has a flag of kubectl that has no meaning here.

    """
    known = {name for option in command.params for name in (*option.opts, *option.secondary_opts)}
    switches: dict[str, tuple[list[str], list[str]]] = {}
    for option in command.params:
        if isinstance(option, click.Option) and option.is_bool_flag:
            on, off = option.opts[-1:], option.secondary_opts[-1:]
            switches |= dict.fromkeys(option.opts, (on, off))
            switches |= dict.fromkeys(option.secondary_opts, (off, on))
    end = args.index("--") if "--" in args else len(args)
    translated: list[str] = []
    for arg in args[:end]:
        name, _, text = arg.partition("=")
        if name in _FLAG_ANSWERS and name not in known and not isinstance(command, click.Group):
            raise click.UsageError(f"{name} is not supported: {_FLAG_ANSWERS[name]}")
        if name in switches and text in _BOOLEANS:
            on, off = switches[name]
            translated += on if _BOOLEANS[text] else off
        else:
            translated.append(arg)
    return [*translated, *args[end:]]

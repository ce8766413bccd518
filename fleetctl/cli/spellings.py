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

# The booleans of Go's flags.
_BOOLEANS = {
    **dict.fromkeys(("true", "True", "TRUE", "t", "T", "1"), True),
    **dict.fromkeys(("false", "False", "FALSE", "f", "F", "0"), False),
}


def translate_switches(command: click.Command, args: Sequence[str]) -> list[str]:
    """Return a command's arguments with kubectl's `--wait=true` and `--wait=false` in click's spelling.

    True is the switch itself; false is its opposite, such as `--no-wait`, or nothing where there is none.
    """
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
        if name in switches and text in _BOOLEANS:
            on, off = switches[name]
            translated += on if _BOOLEANS[text] else off
        else:
            translated.append(arg)
    return [*translated, *args[end:]]

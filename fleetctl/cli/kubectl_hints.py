"""Answers for users of kubectl and similar tools: synonyms of verbs, spellings of switches, and flags that fleetctl does not need."""

from collections.abc import Callable, Sequence
from typing import Any

import click

Command = Callable[..., Any]

# What users of other tools type. Typing errors are found by their letters.
VERB_SYNONYMS = {
    "cat": "get", "status": "get",
    "remove": "delete", "rm": "delete", "show": "describe", "inspect": "describe",
    "start": "up", "serve": "up", "deploy": "apply", "prompt": "chat", "ask": "chat",
    "tail": "logs", "journal": "logs", "stats": "top", "check": "doctor", "context": "config", "image": "model",
    "list": "get-contexts", "ls": "get-contexts",
}  # fmt: skip

_MODELS = (
    "`fleetctl get md` lists the deployed models, `fleetctl models list` the files that Macs fetched, "
    "`fleetctl get nodes` the Macs"
)
_PULL = (
    "`fleetctl run ORGANISATION/NAME` fetches a model of a hub, deploys it and chats; "
    "`fleetctl models pull ORGANISATION/NAME --all` only fetches it onto the Macs"
)
_PUSH = (
    "nothing is uploaded: Macs fetch models from a hub (`fleetctl models pull`) and from each other, or have "
    "folders of their own (`fleetctl create modeldeployment NAME --model FOLDER`)"
)
_SEARCH = "`fleetctl models search WORD...` searches a list of well-known repositories"
_FIT = "`fleetctl models fit ORGANISATION/NAME` shows which Macs can serve a model"
_QUANTIZE = "`fleetctl models quantize` quantizes a model on a Mac that has it"
_PORTS = (
    "clients talk to a gateway, never to an engine: `fleetctl cluster-info` shows the addresses of the gateways; "
    "to reach one that listens on its own Mac only: ssh -L 4000:127.0.0.1:4000 MAC"
)
_PROCESSES = (
    "engines are processes of their Macs, not containers: log in with ssh; `fleetctl logs REPLICA` and "
    "`fleetctl describe replica REPLICA` need no login"
)
_KEYS = "`fleetctl create apikey NAME` creates a key, and `fleetctl get apikeys` lists them"

# Verbs of kubectl and Ollama that fleetctl does not need, and the command to use instead.
VERB_ANSWERS = {
    "list": _MODELS,
    "ls": _MODELS,
    "ps": "`fleetctl get replicas` lists the running replicas, `fleetctl top models` their load",
    "pull": _PULL,
    "download": _PULL,
    "push": _PUSH,
    "search": _SEARCH,
    "find": _SEARCH,
    "fit": _FIT,
    "quantize": _QUANTIZE,
    "convert": _QUANTIZE,
    "load": "`fleetctl scale md/NAME --replicas=1` starts a replica; `fleetctl create modeldeployment` deploys a model",
    "unload": "`fleetctl scale md/NAME --replicas=0` ends all replicas of a model",
    "exec": _PROCESSES,
    "attach": _PROCESSES,
    "debug": _PROCESSES,
    "cp": _PROCESSES,
    "port-forward": _PORTS,
    "proxy": _PORTS,
    "expose": "every deployment is served by all gateways; `fleetctl create modelroute` gives it further names",
    "auth": _KEYS,
    "login": _KEYS,
    "kustomize": "`fleetctl apply -f DIR` reads overlays: a folder with an overlay.yaml; `fleetctl diff -f DIR` previews it",
    "namespace": "fleets have no namespaces; a fleet in a shared etcd has its own --etcd-prefix",
    "api-versions": "`fleetctl api-resources` lists the kinds; their only version is fleet/v1alpha1",
}

# Kinds of Kubernetes, and those that do their job here.
KIND_SYNONYMS = {
    "deployment": "modeldeployments", "deployments": "modeldeployments", "deploy": "modeldeployments",
    "model": "modeldeployments", "models": "modeldeployments",
    "pod": "replicas", "pods": "replicas", "po": "replicas", "rs": "revisions", "replicaset": "revisions",
    "replicasets": "revisions", "service": "modelroutes", "services": "modelroutes", "svc": "modelroutes",
    "ingress": "modelroutes", "ingresses": "modelroutes", "httproute": "modelroutes",
    "kustomization": "gitsources", "gitrepository": "gitsources", "secret": "apikeys", "secrets": "apikeys",
}  # fmt: skip

# Words that are no kinds, and the command that has what they mean.
_TOKENS = "`fleetctl token list` lists join tokens"
_CERTIFICATES = "`fleetctl cert list` lists certificates and requests for them"
_HUB_TOKENS = (
    "tokens of hubs cannot be listed: `fleetctl create hubtoken NAME --token-file FILE` stores or replaces one, and "
    "`fleetctl create hubtoken NAME --remove` deletes it"
)
_EXTERNAL_KEYS = (
    "keys of external servers cannot be listed: `fleetctl create externalkey NAME --url URL --token-file FILE` stores or "
    "replaces one, and `fleetctl create externalkey NAME --remove` deletes it"
)
KIND_ANSWERS = {
    "externalkey": _EXTERNAL_KEYS, "externalkeys": _EXTERNAL_KEYS,
    "hubtoken": _HUB_TOKENS, "hubtokens": _HUB_TOKENS,
    "token": _TOKENS, "tokens": _TOKENS,
    "certificate": _CERTIFICATES, "certificates": _CERTIFICATES, "cert": _CERTIFICATES, "csr": _CERTIFICATES,
    "context": "`fleetctl config get-contexts` lists contexts", "contexts": "`fleetctl config get-contexts` lists contexts",
    "namespace": VERB_ANSWERS["namespace"], "namespaces": VERB_ANSWERS["namespace"], "ns": VERB_ANSWERS["namespace"],
}  # fmt: skip

# The booleans of Go's flags.
_BOOLEANS = {
    **dict.fromkeys(("true", "True", "TRUE", "t", "T", "1"), True),
    **dict.fromkeys(("false", "False", "FALSE", "f", "F", "0"), False),
}

_NO_NAMESPACES = (
    "fleets have no namespaces; a fleet in a shared etcd has its own --etcd-prefix. Remove"
)


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


def unsupported_flag(
    hint: str, *names: str, takes_value: bool = False
) -> Callable[[Command], Command]:
    """Return the decorator for a hidden flag that fails with a hint on what to use instead."""

    def refuse(_: click.Context, parameter: click.Parameter, value: object) -> None:
        if value not in (None, False):
            raise click.UsageError(f"{'/'.join(parameter.opts)} is not supported: {hint}")

    return click.option(
        *names,
        is_flag=not takes_value,
        default=None if takes_value else False,
        hidden=True,
        expose_value=False,
        callback=refuse,
    )


def namespace_flags(command: Command) -> Command:
    """Add the hidden flags -n and -A, which fail: fleets have no namespaces."""
    for names, is_flag in (("-A", "--all-namespaces"), True), (("-n", "--namespace"), False):
        option = click.option(
            *names, is_flag=is_flag, expose_value=False, hidden=True, callback=_refuse_namespaces
        )
        command = option(command)
    return command


def _refuse_namespaces(_: click.Context, parameter: click.Parameter, value: Any) -> None:
    if value:
        raise click.UsageError(f"{_NO_NAMESPACES} {parameter.opts[0]}")

"""Redaction of secrets, prompts and answers, home folders and mail addresses. Pure.

Redacts too much rather than too little. Names of hosts, nodes and models and addresses stay, because a diagnosis needs
them.
"""

import json
import re
from collections.abc import Mapping
from typing import Any

REDACTED = "<redacted>"

_HIDDEN = r"(?:passwords?|passwd|passphrase|secrets?|token|api[-_]?keys?|authorization|credentials?|cookie|private[-_]?key)"
# Keys whose value is a secret, or identifies a person.
_HIDDEN_KEY = re.compile(rf"(?i)(?:.{{0,200}}[-_.]|.{{0,200}}(?=[A-Z]))?{_HIDDEN}$|^user(?:name)?$")
# Keys whose value is text of a prompt or an answer.
_CONTENT_KEY = re.compile(
    r"(?i)^(?:prompts?|messages|content|inputs?|completions?|questions?|answers?|body|text|reasoning|arguments)$"
)

# A line of a log may be long and hostile: each pattern begins with a fixed text, or repeats a bounded number of times.
_PATTERNS: tuple[tuple[re.Pattern[str], str], ...] = (
    (
        re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)", re.DOTALL),
        REDACTED,
    ),
    # Credentials in HTTP headers.
    (re.compile(r"(?i)\b(bearer|basic)\s+[\w.~+/=-]{6,}"), rf"\1 {REDACTED}"),
    # Keys with a known prefix: our own and OpenAI's, GitHub's, GitLab's, Hugging Face's, Slack's, AWS's, and JSON Web
    # Tokens.
    (
        re.compile(
            r"\b(?:sk-[\w-]{8,}|gh[pousr]_\w{16,}|github_pat_\w{16,}|glpat-[\w-]{10,}|hf_\w{16,}|xox[abprs]-[\w-]{8,}"
            r"|AKIA[0-9A-Z]{12,}|eyJ[\w-]{8,4000}\.[\w-]{8,4000}\.[\w-]*)"
        ),
        REDACTED,
    ),
    # scheme://user:password@host
    (re.compile(r"(\b[a-z][a-z0-9+.-]{0,30}://)[^\s/@\"']+@"), rf"\1{REDACTED}@"),
    # password=..., "token": "...", FLEET_ETCD_PASSWORD=...; numbers are token counts, not secrets.
    (
        re.compile(
            rf"(?i)({_HIDDEN}[\"']?\s{{0,20}}[=:]\s*)(?!\d+(?:\.\d+)?\b|null\b|true\b|false\b|{REDACTED})"
            r"(?:\"[^\"]*\"|'[^']*'|[^\s,;&})\]\"']+)"
        ),
        rf"\1{REDACTED}",
    ),
    (re.compile(r"\b[\w.+-]{1,64}@[\w-]{1,63}(?:\.[\w-]{1,63}){1,10}\b"), "<mail>"),
    (re.compile(r"(?<![\w.])/(?:Users|home)/[^\s/\"':,;)\]]+|(?<![\w./-])/(?:var/)?root(?=[/\s\"':,;)\]]|$)"), "~"),
)  # fmt: skip


def redact_text(text: str) -> str:
    """Return the text without sensitive parts."""
    for pattern, replacement in _PATTERNS:
        text = pattern.sub(replacement, text)
    return text


def redact_tree(tree: Any) -> Any:
    """Return a JSON tree without sensitive parts."""
    if isinstance(tree, Mapping):
        return {redact_text(str(key)): _value(str(key), value) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return [redact_tree(one) for one in tree]
    if isinstance(tree, str):
        # Redact a string of a tree; embedded JSON, as in managedFields, stays valid JSON.
        if tree.lstrip()[:1] in ("{", "["):
            try:
                inner = json.loads(tree)
            except (ValueError, RecursionError):
                return redact_text(tree)
            return json.dumps(redact_tree(inner), ensure_ascii=False, separators=(",", ":"))
        return redact_text(tree)
    return tree


def _value(key: str, value: Any) -> Any:
    if value in (None, "", [], {}) or isinstance(value, bool | int | float):
        return value
    has_secret_key = _HIDDEN_KEY.match(key) is not None and not isinstance(value, Mapping)
    if has_secret_key or _CONTENT_KEY.match(key) is not None:
        return REDACTED
    return redact_tree(value)


def redact_log(text: str) -> str:
    """Return a log without sensitive parts; our processes write one JSON object per line."""
    # Redact private keys first, because they span several lines.
    return "".join(
        _line(line) for line in _PATTERNS[0][0].sub(REDACTED, text).splitlines(keepends=True)
    )


def _line(line: str) -> str:
    bare = line.rstrip("\r\n")
    if bare.startswith("{"):
        try:
            record = json.loads(bare)
        except (ValueError, RecursionError):
            return redact_text(line)
        return json.dumps(redact_tree(record), ensure_ascii=False) + line[len(bare) :]
    return redact_text(line)

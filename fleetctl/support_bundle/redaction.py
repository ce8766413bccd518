"""Takes out what must not leave the fleet: secrets, what people asked models, home folders, mail addresses. Pure.

Takes out too much where it is in doubt. Names of hosts, nodes, models and addresses stay: without them nothing is found.
"""

import json
import re
from collections.abc import Mapping
from typing import Any

REDACTED = "<redacted>"

_HIDDEN = r"(?:passwords?|passwd|passphrase|secrets?|token|api[-_]?keys?|authorization|credentials?|cookie|private[-_]?key)"
# Keys whose text is a secret, or who somebody is.
_HIDDEN_KEY = re.compile(rf"(?i)(?:.*[-_.]|.*(?=[A-Z]))?{_HIDDEN}$|^user(?:name)?$")
# Keys under which people's words to models, and the models' to them, would stand.
_WORDS_KEY = re.compile(
    r"(?i)^(?:prompts?|messages|content|inputs?|completions?|questions?|answers?|body|text|reasoning|arguments)$"
)

_PATTERNS: tuple[tuple[re.Pattern[str], str], ...] = (
    (
        re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)", re.DOTALL),
        REDACTED,
    ),
    # Who asks: HTTP's two schemes.
    (re.compile(r"(?i)\b(bearer|basic)\s+[\w.~+/=-]{6,}"), rf"\1 {REDACTED}"),
    # Keys that say by their beginning what they are: ours and OpenAI's, GitHub's, GitLab's, Hugging Face's, Slack's,
    # AWS's, and JSON Web Tokens.
    (
        re.compile(
            r"\b(?:sk-[\w-]{8,}|gh[pousr]_\w{16,}|github_pat_\w{16,}|glpat-[\w-]{10,}|hf_\w{16,}|xox[abprs]-[\w-]{8,}"
            r"|AKIA[0-9A-Z]{12,}|eyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*)"
        ),
        REDACTED,
    ),
    # scheme://user:password@host
    (re.compile(r"(\b[a-z][a-z0-9+.-]*://)[^\s/@\"']+@"), rf"\1{REDACTED}@"),
    # password=..., "token": "...", FLEET_ETCD_PASSWORD=...; numbers are counts of tokens.
    (
        re.compile(
            rf"(?i)\b([\w-]*{_HIDDEN}[\"']?\s*[=:]\s*)(?!\d+(?:\.\d+)?\b|null\b|true\b|false\b|{REDACTED})"
            r"(?:\"[^\"]*\"|'[^']*'|[^\s,;&})\]\"']+)"
        ),
        rf"\1{REDACTED}",
    ),
    (re.compile(r"\b[\w.+-]+@[\w-]+(?:\.[\w-]+)+\b"), "<mail>"),
    (re.compile(r"(?<![\w.])/(?:Users|home)/[^\s/\"':,;)\]]+|(?<![\w./-])/(?:var/)?root(?=[/\s\"':,;)\]]|$)"), "~"),
)  # fmt: skip


def redact_text(found: str) -> str:
    """Return text without what must not leave."""
    for pattern, instead in _PATTERNS:
        found = pattern.sub(instead, found)
    return found


def redact_tree(found: Any) -> Any:
    """Return what JSON gives, without what must not leave."""
    if isinstance(found, Mapping):
        return {redact_text(str(key)): _value(str(key), value) for key, value in found.items()}
    if isinstance(found, list | tuple):
        return [redact_tree(one) for one in found]
    if isinstance(found, str):
        return _json(found)
    return found


def _json(found: str) -> str:
    """Return a text of a tree; JSON in it, as in managedFields, stays JSON."""
    if found.lstrip()[:1] in ("{", "["):
        try:
            inner = json.loads(found)
        except (ValueError, RecursionError):
            return redact_text(found)
        return json.dumps(redact_tree(inner), ensure_ascii=False, separators=(",", ":"))
    return redact_text(found)


def _value(key: str, value: Any) -> Any:
    if value in (None, "", [], {}) or isinstance(value, bool | int | float):
        return value
    is_named_so = _HIDDEN_KEY.match(key) is not None and not isinstance(value, Mapping)
    if is_named_so or _WORDS_KEY.match(key) is not None:
        return REDACTED
    return redact_tree(value)


def redact_log(found: str) -> str:
    """Return a log without what must not leave; our processes write one JSON object a line."""
    # Over the whole first: a private key goes over several lines.
    return "".join(
        _line(line) for line in _PATTERNS[0][0].sub(REDACTED, found).splitlines(keepends=True)
    )


def _line(line: str) -> str:
    bare = line.rstrip("\r\n")
    if bare.startswith("{"):
        try:
            found = json.loads(bare)
        except (ValueError, RecursionError):
            return redact_text(line)
        return json.dumps(redact_tree(found), ensure_ascii=False) + line[len(bare) :]
    return redact_text(line)

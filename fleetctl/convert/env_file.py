"""Reader of files with variables: .env files and Makefiles. Pure."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from manifests.documents import Document
from manifests.errors import ManifestError, ManifestErrors
from manifests.trees import Path
from manifests.yaml.comments import DocumentComments, FieldComments
from manifests.yaml.nodes import MappingEntry, Mark, YamlNode

_LINE = re.compile(r"\s*(?:export\s+)?([A-Za-z_][A-Za-z0-9_]*)\s*(\?|::?)?=\s*(.*?)\s*")
# A rule of a Makefile, or a line of its recipe.
_RULE = re.compile(r"\t.*|[A-Za-z0-9_.%$() /-]+:(?!=).*")
_DIRECTIVE = re.compile(
    r"\s*(-?include|ifn?def|ifn?eq|else|endif|define|endef|export|unexport)\b.*"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvTool:
    """The tool whose variables a file sets."""

    name: str
    known: frozenset[str]
    """Variables of which the file must set one: others could belong to any tool."""
    some: str
    """A few of them, for messages."""
    has_makefiles: bool = False
    """True if the tool's variables may be in a Makefile, whose rules are skipped."""


def read_env(text: str, source: str, tool: EnvTool) -> Document:
    """Return the variables as a mapping with line numbers; a later assignment wins, as in python-dotenv.

    In a Makefile, `?=` does not replace an earlier value.

    Raises:
        ManifestErrors: a line sets no variable, or none of the tool's variables is set.

    """
    entries: dict[str, MappingEntry] = {}
    problems: list[ManifestError] = []
    for number, line in enumerate(text.removeprefix("\ufeff").splitlines(), start=1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        match = _LINE.fullmatch(line)
        if match is None or (match[2] and not tool.has_makefiles):
            if not (tool.has_makefiles and (_RULE.fullmatch(line) or _DIRECTIVE.fullmatch(line))):
                problems.append(
                    ManifestError(
                        source=source, line=number, column=1, message="expected NAME=VALUE", hint=""
                    )
                )
            continue
        if line.startswith("\t") and tool.has_makefiles:
            continue
        mark = Mark(line=number, column=1)
        value = _unquote(match[3])
        if match[2] != "?" or match[1] not in entries:
            entries[match[1]] = MappingEntry(
                mark=mark, node=YamlNode(mark=mark, content=value, text=value)
            )
    _check(entries, problems, source, tool)
    return Document(
        source=source,
        root=YamlNode(mark=Mark(line=1, column=1), content=entries),
        comments=DocumentComments(fields=_comments(text, entries)),
    )


def _comments(text: str, entries: Mapping[str, MappingEntry]) -> dict[Path, FieldComments]:
    """Return the comments above each variable, up to an empty line."""
    lines = text.removeprefix("\ufeff").splitlines()
    found: dict[Path, FieldComments] = {}
    for name, entry in entries.items():
        first = entry.mark.line - 1
        while first and lines[first - 1].lstrip().startswith("#"):
            first -= 1
        above = [line.lstrip()[1:].rstrip() for line in lines[first : entry.mark.line - 1]]
        if above:
            found[(name,)] = FieldComments(above=tuple(above))
    return found


def _check(
    entries: dict[str, MappingEntry], problems: list[ManifestError], source: str, tool: EnvTool
) -> None:
    """Raise ManifestErrors unless all lines were read and one variable is the tool's."""
    if not entries:
        hint = "Did you mean import mesh, serving or localai?" if problems else ""
        message = "is not an .env file: no line is NAME=VALUE" if problems else "sets no variables"
        raise ManifestErrors([ManifestError(source=source, message=message, hint=hint)])
    if not entries.keys() & tool.known:
        message = f"sets no variable of {tool.name}, such as {tool.some}"
        raise ManifestErrors([ManifestError(source=source, message=message)])
    if problems:
        raise ManifestErrors(problems)


def _unquote(value: str) -> str:
    if value[:1] in ("'", '"'):
        end = value.find(value[0], 1)
        return value[1:end] if end > 0 else value
    return "" if value.startswith("#") else re.split(r"\s+#", value, maxsplit=1)[0]

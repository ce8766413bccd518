"""Fields of log lines: one name for one meaning in every process (docs/operations/monitoring.md, Logs)."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.support.syntax import nodes

ROOT = Path(__file__).parents[2]
PACKAGES = (
    *(
        "schemas",
        "machinery",
        "store",
        "models",
        "identity",
        "manifests",
        "compat",
        "reconciler",
        "nodeagent",
    ),
    *("engine", "gateway", "insight", "dashboard", "fleetctl"),
)
# The field that has the meaning of each of these names.
SYNONYMS = {
    **dict.fromkeys(("error", "err", "cause", "exception", "problem", "detail"), "why"),
    **dict.fromkeys(("host", "mac_name", "machine", "node_name"), "node"),
    **dict.fromkeys(("req_id", "requestId", "request"), "request_id"),
    **dict.fromkeys(("trace", "traceId"), "trace_id"),
    **dict.fromkeys(("by", "person", "username"), "user"),
    **dict.fromkeys(("code", "returncode", "exitcode"), "exit_code"),
    **dict.fromkeys(("object", "name"), "key"),
    **dict.fromkeys(("took_s", "elapsed_s", "duration"), "seconds"),
}
# Texts of errors belong under `why`: `reason` has the code of a reason.
_ERROR_TEXT = re.compile(r"str\((error|\w*_error)\)|error\.strerror|error\.message|repr\(error\)")


@cache
def log_fields(package: str) -> tuple[tuple[str, str, str], ...]:
    """Return place, name and value of the fields that are given to a logger as a literal."""
    return tuple(_found_fields(package))


def _found_fields(package: str) -> Iterator[tuple[str, str, str]]:
    for file in sorted((ROOT / package).rglob("*.py")):
        for node in nodes(file):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                continue
            for keyword in node.keywords:
                if keyword.arg == "extra":
                    for one in ast.walk(keyword.value):
                        if isinstance(one, ast.Dict):
                            for key, value in zip(one.keys, one.values, strict=True):
                                if isinstance(key, ast.Constant):
                                    place = f"{file.relative_to(ROOT)}:{node.lineno}"
                                    yield place, str(key.value), ast.unparse(value)


@pytest.mark.parametrize("package", PACKAGES)
def test_one_field_has_one_name(package: str) -> None:
    wrong = []
    for place, name, value in log_fields(package):
        if name in SYNONYMS:
            wrong.append(f"{place}: {name} is {SYNONYMS[name]}")
        if not re.fullmatch(r"[a-z][a-z0-9_]*", name):
            wrong.append(f"{place}: {name} is not in snake_case")
        if name != "why" and _ERROR_TEXT.fullmatch(value):
            wrong.append(f"{place}: {name} is the text of an error: why")
    assert wrong == []


def test_the_check_finds_the_fields() -> None:
    found = {name for package in PACKAGES for _, name, _ in log_fields(package)}
    assert {"why", "reason", "node", "replica", "request_id", "user", "key"} <= found

"""Tables of `fleetctl get`, from objects without a store."""

from datetime import UTC, datetime, timedelta

import pytest

from fleetctl.objects.table_context import TableContext
from fleetctl.output import printers
from schemas.meta import ObjectMeta
from schemas.route import (
    Backend,
    ModelRoute,
    ModelRouteSpec,
    ModelRouteStatus,
)

NOW = datetime(2026, 1, 1, tzinfo=UTC)


def route(name: str, status: ModelRouteStatus | None = None, **more: object) -> ModelRoute:
    fields = {"model": name, "backends": (Backend(deployment="qwen", weight=9),), **more}
    meta = ObjectMeta(name=name, creation_timestamp=NOW)
    return ModelRoute(metadata=meta, spec=ModelRouteSpec.model_validate(fields), status=status)


@pytest.mark.parametrize(
    ("rows", "titles", "expected"),
    [
        ([["a", "b"]], ["NAME", "X"], "NAME   X\na      b"),
        ([["a", ""], ["long", "b"]], [], "a\nlong   b"),
        ([["a", "b"]], [], "a     b"),
        ([["東京", "b"], ["abcd", "c"]], [], "東京   b\nabcd   c"),
        ([["e\u0301", "b"], ["ab", "c"]], [], "e\u0301     b\nab    c"),
        ([["one\ntwo words", "b"]], [], "one         b\ntwo words"),
        ([["a\u2028\r\x85b", ""], ["", "c"], ["d"]], [], "a   b\n        c\nd"),
        ([], ["NAME", "X"], "NAME   X"),
        ([], [], ""),
    ],
)
def test_columns_are_aligned(rows: list[list[str]], titles: list[str], expected: str) -> None:
    assert printers.align_columns(rows, titles) == expected


def test_columns_never_get_narrower() -> None:
    wide = printers.widths([("a-long-name", "b")], ("NAME", "X"))
    assert wide == (11, 3)
    assert printers.align_columns([("a", "b")], least=wide) == "a             b"
    assert printers.widths([("a", "longer", "new")], before=wide) == (11, 6, 3)


def test_control_characters_are_removed_from_cells() -> None:
    tree = {
        "kind": "Event",
        "metadata": {"name": "a"},
        "spec": {
            "lastSeen": NOW.isoformat(),
            "type": "Warning",
            "reason": "X\x1b[2J",
            "message": "one\ntwo",
            "about": {"kind": "Node", "name": "mac-1"},
        },
    }
    shown = printers.table([tree], TableContext(now=NOW), is_wide=False, headers=False)
    assert shown == "0s    Warning   X [2J   Node/mac-1   one..."


def test_commits_are_shortened_except_in_wide_tables() -> None:
    revision = f"main@{'0123456789' * 4}"
    tree = {
        "kind": "GitSource",
        "metadata": {"name": "home", "creationTimestamp": NOW.isoformat()},
        "status": {"appliedRevision": revision},
    }
    shown = {
        is_wide: printers.table(
            [tree], TableContext(now=NOW), is_wide=is_wide, headers=False
        ).split()[3]
        for is_wide in (False, True)
    }
    assert shown == {False: "main@012345678901", True: revision}


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        pytest.param(30 * 86_400 - 2, "in 30d", id="a-moment-after-30d"),
        pytest.param(2 * 86_400 - 2, "in 48h", id="two-days"),
        pytest.param(5 * 60 + 31, "in 6m", id="minutes"),
        pytest.param(59.6, "in 60s", id="seconds"),
        pytest.param(0, "expired", id="now"),
    ],
)
def test_the_time_until_a_key_expires_is_rounded(seconds: float, expected: str) -> None:
    at = (NOW + timedelta(seconds=seconds)).isoformat()
    key = {"kind": "ApiKey", "metadata": {"name": "ci"}, "spec": {"expires": at}}
    (row,) = printers.rows([key], TableContext(now=NOW), printers.TableOptions())
    assert row[printers.titles("ApiKey", printers.TableOptions()).index("EXPIRES")] == expected


def test_the_health_of_cables_is_a_column_and_no_status() -> None:
    tree = {
        "kind": "Node",
        "metadata": {"name": "mac-1", "creationTimestamp": NOW.isoformat()},
        "spec": {
            "taints": [
                {"key": "owner", "value": "ann", "effect": "NoSchedule"},
                {"key": "hot", "effect": "NoExecute"},
            ]
        },
        "status": {
            "conditions": [
                {"type": "FabricHealthy", "status": "True"},
                {"type": "DiskPressure", "status": "True"},
            ]
        },
    }
    context = TableContext(now=NOW, ready_nodes=frozenset({"mac-1"}))
    columns = {column.title: column for column in printers.COLUMNS["Node"]}
    assert columns["STATUS"].cell(tree, context) == "Ready,DiskPressure"
    assert columns["FABRIC HEALTHY"].cell(tree, context) == "True"
    assert columns["FABRIC HEALTHY"].is_wide
    assert columns["TAINTS"].cell(tree, context) == "owner=ann:NoSchedule,hot:NoExecute"
    pool = {"kind": "NodePool", "spec": {"reserved": {"memory": "5Gi", "disk": None}}}
    (reserved,) = [column for column in printers.COLUMNS["NodePool"] if column.title == "RESERVED"]
    assert reserved.cell(pool, context) == "memory=5Gi"

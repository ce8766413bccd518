"""Route of one shard group: its links, checks and replicas, and the epochs that the history knows."""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Final

from fastapi import APIRouter, Response

from dashboard.api.past import PastReader
from dashboard.api.routes import json_response
from dashboard.api.time_parameters import show_time
from dashboard.history.moments import ObjectChange
from dashboard.history.queries import ReadError
from insight.conditions import Row
from insight.fleet_caches import FleetCaches
from insight.shard_groups import group_detail
from machinery.clock import Clock
from schemas.wire.errors import RefusedError, refused

_DAY_S: Final = 24 * 3600.0
_MOST_REPLICAS: Final = 20
_MOST_EPOCHS: Final = 100


@dataclass(frozen=True, slots=True)
class GroupRoutes:
    """Handler of `/api/v1/groups/NAME`."""

    caches: FleetCaches
    past: PastReader
    clock: Clock

    def add_to(self, router: APIRouter) -> None:
        """Register the route."""
        router.add_api_route("/api/v1/groups/{name}", self.group, methods=["GET"])

    async def group(self, name: str) -> Response:
        """Return a group's links between Macs, cable checks, how its replicas are split, and epochs of the last 24 hours."""
        found = group_detail(self.caches, name)
        if found is None:
            raise refused(404, f"There is no ShardGroup '{name[:200]}', or not any more.")
        return json_response({**found, "epochs": await self._epochs(found)})

    async def _epochs(self, group: Row) -> list[Row] | None:
        """Return the epochs of the group's replicas, newest first; None without a history."""
        replicas = group["replicas"]
        assert isinstance(replicas, list)
        begin_s = self.clock.now().timestamp() - _DAY_S
        rows: list[Row] = []
        for replica in replicas[:_MOST_REPLICAS]:
            try:
                changes = await self.past.reader.changes("Replica", replica["name"], begin_s)
            except (RefusedError, ReadError):
                return None
            rows += epochs_of(replica["name"], changes)
        rows.sort(key=lambda row: str(row["formedAt"]), reverse=True)
        return rows[:_MOST_EPOCHS]


def epochs_of(replica: str, changes: Iterable[ObjectChange]) -> list[Row]:
    """Return the epochs that the changes of a replica tell of, each with the reason of its end. Pure."""
    rows: dict[int, Row] = {}
    for change in sorted(changes, key=lambda one: one.at_s):
        document: dict[str, Any] = {} if change.document is None else json.loads(change.document)
        if change.part == "spec":
            _note_formation(replica, rows, document, change.at_s)
        else:
            for number, reason, message in _ends(document):
                if (row := rows.get(number)) is not None and row["endedAt"] is None:
                    row |= {"endedAt": show_time(change.at_s), "reason": reason, "message": message}
    return list(rows.values())


def _note_formation(
    replica: str, found: dict[int, Row], document: dict[str, Any], at_s: float
) -> None:
    formation = (document.get("spec") or {}).get("formation") or {}
    number = formation.get("epoch")
    for earlier, row in found.items():
        if earlier == number:
            continue
        row["endedAt"] = row["endedAt"] or show_time(at_s)
        if isinstance(number, int) and earlier == number - 1 and not row["message"]:
            # The status that tells of the end may be replaced before it is recorded.
            row["message"] = formation.get("because") or ""
    if isinstance(number, int) and number not in found:
        found[number] = {
            "name": f"{replica}/{number}",
            "replica": replica,
            "epoch": number,
            "backend": formation.get("backend"),
            "formedAt": formation.get("formedAt"),
            "macs": [rank.get("node") for rank in document["spec"].get("ranks", [])],
            "endedAt": None,
            "reason": "",
            "message": "",
        }


def _ends(status: dict[str, Any]) -> Iterator[tuple[int, str, str]]:
    """Yield the number, reason and message of the epoch that a status says is over."""
    for one in status.get("conditions", []):
        if one.get("type") != "EpochOver" or one.get("status") != "True":
            continue
        head, _, rest = str(one.get("message", "")).partition(": ")
        number = head.removeprefix("epoch ")
        if number.isascii() and number.isdigit():
            yield int(number), str(one.get("reason", "")), rest

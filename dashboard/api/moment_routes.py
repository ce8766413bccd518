"""Routes of objects and of earlier moments: one object now or then, its changes, events, and the times that are known."""

import asyncio
import difflib
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Final

from fastapi import APIRouter, Query, Response

from dashboard.api.past import PastReader
from dashboard.api.routes import json_response
from dashboard.api.time_parameters import parse_range, parse_time, show_time
from dashboard.history.moments import ObjectChange
from insight import fleet_views
from insight.conditions import Row
from insight.fleet_caches import FleetCaches, caches_of
from machinery.clock import Clock
from manifests.declaration import clean_manifest
from manifests.diff import FieldChange, changed_fields
from manifests.yaml import core_schema
from schemas.meta import ApiObject
from schemas.wire.errors import refused
from store import keys, object_trees

_MOST_EVENTS: Final = 1000
_MOST_FIELDS: Final = 100
_WORDS: Final = ("kind", "object", "type")


@dataclass(frozen=True, slots=True)
class MomentRoutes:
    """Handlers of the routes."""

    caches: FleetCaches
    past: PastReader
    clock: Clock

    def add_to(self, router: APIRouter) -> None:
        """Register the routes."""
        for path, answer in (
            ("/api/v1/objects/{kind}/{name}", self.object),
            ("/api/v1/objects/{kind}/{name}/changes", self.changes),
            ("/api/v1/objects/{kind}/{name}/diff", self.diff),
            ("/api/v1/events", self.events),
            ("/api/v1/history", self.history),
        ):
            router.add_api_route(path, answer, methods=["GET"])

    async def object(
        self,
        kind: str,
        name: str,
        at: Annotated[str, Query(max_length=40)] = "",
        form: Annotated[str, Query(max_length=20)] = "",
    ) -> Response:
        """Return one object with its status as YAML, without secrets. `at`: as it was at an earlier time.

        `form=manifest`: as a user would declare it, without defaults.
        """
        moment = await self.past.moment(at) if at else None
        caches = self.caches if moment is None else moment.caches
        spec = caches.objects.specs.items.get(keys.spec_key(kind, name))
        if spec is None:
            when = "then" if moment else "or not any more"
            raise refused(404, f"There is no {kind[:60]} '{name[:200]}', {when}.")
        status = caches.objects.statuses.items.get(keys.status_key(kind, name))
        text = core_schema.dump(clean_manifest(spec)) if form == "manifest" else _yaml(spec, status)
        body: Row = {"kind": kind, "name": name, "yaml": text}
        if moment is not None:
            body |= {"at": show_time(moment.at_s), "ageSeconds": moment.age_s}
        return json_response(body)

    async def changes(
        self,
        kind: str,
        name: str,
        from_: Annotated[str, Query(alias="from", max_length=40)] = "24h",
        limit: Annotated[int, Query(ge=1, le=500)] = 50,
    ) -> Response:
        """Return the recorded changes of an object, newest first, each with the fields that differ."""
        begin_s = parse_time(from_, "from", self.clock.now().timestamp())
        object_changes = await self.past.reader.changes(kind, name, begin_s)
        shown = await asyncio.to_thread(lambda: list(_with_fields(object_changes))[:limit])
        return json_response({"kind": kind, "name": name, "changes": shown})

    async def diff(
        self,
        kind: str,
        name: str,
        from_: Annotated[str, Query(alias="from", max_length=40)],
        to: Annotated[str, Query(max_length=40)] = "now",
    ) -> Response:
        """Return how one object differs between two times, as a diff of its YAML; empty if it does not."""
        before = (await self._text(kind, name, from_)).splitlines()
        after = (await self._text(kind, name, to)).splitlines()
        lines = await asyncio.to_thread(
            lambda: list(difflib.unified_diff(before, after, from_, to, lineterm=""))
        )
        return json_response({"kind": kind, "name": name, "diff": "\n".join(lines)})

    async def _text(self, kind: str, name: str, at: str) -> str:
        """Return an object at a time as YAML; empty if there was none."""
        caches = self.caches if at == "now" else (await self.past.moment(at)).caches
        spec = caches.objects.specs.items.get(keys.spec_key(kind, name))
        status = caches.objects.statuses.items.get(keys.status_key(kind, name))
        return "" if spec is None else await asyncio.to_thread(_yaml, spec, status)

    async def events(
        self,
        from_: Annotated[str, Query(alias="from", max_length=40)] = "24h",
        to: Annotated[str, Query(max_length=40)] = "now",
        kind: Annotated[str, Query(max_length=60)] = "",
        object_: Annotated[str, Query(alias="object", max_length=300)] = "",
        type_: Annotated[str, Query(alias="type", max_length=20)] = "",
        limit: Annotated[int, Query(ge=1, le=_MOST_EVENTS)] = 200,
    ) -> Response:
        """Return events of the last 24 hours, newest first, those that etcd has forgotten too."""
        begin_s, end_s = parse_range(from_, to, self.clock.now().timestamp())
        items = await self.past.reader.documents(keys.EVENT_PREFIX, begin_s)
        rows = await asyncio.to_thread(
            lambda: fleet_views.rows(caches_of(items, self.clock), "events")
        )
        wanted = dict(zip(_WORDS, (kind, object_, type_), strict=True))
        found = [
            row
            for row in rows
            if begin_s <= _last_seen_s(row) < end_s
            and all(not value or row[word] == value for word, value in wanted.items())
        ]
        found.sort(key=_last_seen_s, reverse=True)
        return json_response({"events": found[:limit], "total": len(found)})

    async def history(
        self,
        from_: Annotated[str, Query(alias="from", max_length=40)] = "24h",
        to: Annotated[str, Query(max_length=40)] = "now",
    ) -> Response:
        """Return the times that can be asked with `at`: those in which the recorder knew the fleet. The rest are gaps."""
        begin_s, end_s = parse_range(from_, to, self.clock.now().timestamp())
        known = await self.past.reader.known(begin_s, end_s)
        return json_response(
            {
                "from": show_time(begin_s),
                "to": show_time(end_s),
                "known": [[show_time(time.begin_s), show_time(time.end_s)] for time in known],
            }
        )


def _last_seen_s(row: Row) -> float:
    time = object_trees.parse_time(row["lastSeen"])
    return 0.0 if time is None else time.timestamp()


def _yaml(spec: ApiObject, status: object) -> str:
    api_object = spec if status is None else spec.model_copy(update={"status": status})
    tree = api_object.model_dump(mode="json", by_alias=True, exclude_none=True)
    tree = object_trees.without_managed_fields(tree)
    return core_schema.dump(tree)


def _with_fields(changes: list[ObjectChange]) -> Iterator[Row]:
    """Yield changes, which are newest first, with the fields that differ from the one before. Pure."""
    for number, change in enumerate(changes):
        before = next((old for old in changes[number + 1 :] if old.part == change.part), None)
        row: Row = {
            # Rounded up: asked for this time, the history has the change.
            "at": show_time(math.ceil(change.at_s * 1000) / 1000),
            "revision": change.revision,
            "part": change.part,
            "isDeletion": change.document is None,
            # The first recorded one may have been there for long.
            "isFirst": before is None,
        }
        if before is not None and change.document is not None:
            fields = changed_fields(_tree(before.document), _tree(change.document))
            row["fields"] = [_field(field) for field in fields[:_MOST_FIELDS]]
            row["moreFields"] = max(0, len(fields) - _MOST_FIELDS)
        yield row


def _tree(document: bytes | None) -> dict[str, Any]:
    found: dict[str, Any] = {} if document is None else json.loads(document)
    found.pop("storedVersion", None)
    return object_trees.without_managed_fields(found)


def _field(one: FieldChange) -> Row:
    return {"path": one.path, "old": one.old, "new": one.new}

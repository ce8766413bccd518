"""The bounds of stored responses."""

from pathlib import Path

import pytest

from gateway.responses.database import MAX_AGE_S, ResponseDatabase, StoredResponse
from machinery.sqlite_file import DatabaseError

NOW_S = MAX_AGE_S * 2


def record(number: int, owner: str = "a", *, size: int = 100, at_s: int = NOW_S) -> StoredResponse:
    return StoredResponse(
        id=f"r{number}", owner=owner, created_s=at_s, input=b"[]", body=b"x" * (size - 2)
    )


def stored(database: ResponseDatabase, owner: str = "a", now_s: int = NOW_S) -> list[int]:
    return [at for at in range(20) if database.response(f"r{at}", owner, now_s) is not None]


def test_the_oldest_of_a_key_and_of_all_make_room(tmp_path: Path) -> None:
    database = ResponseDatabase(tmp_path / "responses", max_owner_bytes=300, max_bytes=500)
    for number in range(5):
        database.add(record(number), NOW_S)
    assert stored(database) == [2, 3, 4]
    for number in range(3):
        database.add(record(number, "b"), NOW_S)
    assert (stored(database), stored(database, "b")) == ([3, 4], [0, 1, 2])
    database.add(record(2, "b", size=200), NOW_S)  # the same again, larger
    assert (stored(database), stored(database, "b")) == ([3, 4], [1, 2])
    with pytest.raises(DatabaseError, match="301 bytes"):
        database.add(record(9, size=301), NOW_S)
    assert stored(database) == [3, 4]
    database.delete("r3", "a")
    for number in (5, 6):
        database.add(record(number), NOW_S)
    assert stored(database) == [5, 6]
    database.delete_owner("a")
    assert (database.owners(), stored(database)) == ({"b"}, [])


def test_old_responses_go(tmp_path: Path) -> None:
    database = ResponseDatabase(tmp_path / "responses")
    database.add(record(1, at_s=NOW_S), NOW_S)
    assert stored(database, now_s=NOW_S + MAX_AGE_S) == [1]
    assert stored(database, now_s=NOW_S + MAX_AGE_S + 1) == []
    database.add(record(2, at_s=NOW_S + MAX_AGE_S + 1), NOW_S + MAX_AGE_S + 1)
    assert stored(database) == [2]

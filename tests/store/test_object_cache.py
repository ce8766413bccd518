"""Tests of `store.object_cache`: an index agrees with a scan of every object."""

from collections.abc import Iterable

from hypothesis import given
from hypothesis import strategies as st

from store.object_cache import Index


def letters(text: str) -> Iterable[str]:
    return text


CHANGES = st.lists(
    st.tuples(st.sampled_from("xyz"), st.none() | st.text("abc", max_size=3)), max_size=40
)


@given(CHANGES)
def test_an_index_agrees_with_a_full_scan(changes: list[tuple[str, str | None]]) -> None:
    index, objects = Index(letters), dict[str, str]()
    for key, obj in changes:
        if obj is None:
            objects.pop(key, None)
            index.drop(key)
        else:
            objects[key] = obj
            index.set(key, obj)
        for value in "abcd":
            found = sorted(k for k, o in objects.items() if value in o)
            assert (index.keys(value), index.count(value)) == (found, len(found))
        assert index.values() == {letter for text in objects.values() for letter in text}


@given(CHANGES)
def test_an_index_forgets_removed_objects(changes: list[tuple[str, str | None]]) -> None:
    index = Index(letters)
    for key, obj in changes:
        index.set(key, obj or "")
    for key, _ in changes:
        index.drop(key)
    assert (index._keys, index._values) == ({}, {})

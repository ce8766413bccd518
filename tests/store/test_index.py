"""An index always answers what a look at every object would."""

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
def test_it_answers_as_a_look_at_every_object_would(changes: list[tuple[str, str | None]]) -> None:
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
def test_it_forgets_what_is_gone(changes: list[tuple[str, str | None]]) -> None:
    index = Index(letters)
    for key, obj in changes:
        index.set(key, obj or "")
    for key, _ in changes:
        index.drop(key)
    assert (index._keys, index._values) == ({}, {})

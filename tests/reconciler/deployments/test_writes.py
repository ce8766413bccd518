"""Batches contain every write once, in order, and fit a transaction of the store."""

from hypothesis import given
from hypothesis import strategies as st

from reconciler.deployments.execute import (
    GuardedWrite,
    merge_writes,
    split_into_batches,
)
from store.port import MAX_OPERATIONS, Delete, ModRevisionGuard, Put

OWNER = ModRevisionGuard(key="owner", mod_revision=7)


def write(number: int, *, size: int = 1, stale: int = 0) -> GuardedWrite:
    return GuardedWrite(
        guards=(OWNER, ModRevisionGuard(key=f"k{number}", mod_revision=0)),
        operations=(
            Put(key=f"k{number}", value=b"x" * size),
            *(Delete(key=f"old/{number}/{at}") for at in range(stale)),
        ),
    )


WRITES = st.lists(
    st.builds(
        write, st.integers(0, 30), size=st.sampled_from([1, 400_000]), stale=st.integers(0, 3)
    ),
    max_size=40,
)


@given(WRITES, st.integers(1, 4))
def test_they_hold_everything_and_fit(writes: list[GuardedWrite], shared: int) -> None:
    found = list(split_into_batches(writes, shared=shared))
    assert [guarded_write for batch in found for guarded_write in batch] == writes
    for batch in found:
        guards, operations = merge_writes(batch)
        assert len(guards) + len(operations) + shared <= MAX_OPERATIONS
        assert len({operation.key for operation in operations}) == len(operations)
        assert (
            sum(len(operation.value) for operation in operations if isinstance(operation, Put))
            <= 2**20
        )


def test_sixty_replicas_are_one_transaction() -> None:
    assert [
        len(batch) for batch in split_into_batches([write(n) for n in range(100)], shared=4)
    ] == [61, 39]


def test_an_oversized_write_is_a_batch_of_its_own() -> None:
    big = write(1, size=2**21)
    assert list(split_into_batches([write(0), big, write(2)], shared=1)) == [
        (write(0),),
        (big,),
        (write(2),),
    ]

"""The scheduler: which prompts a step reads, in tables of situations and as a property."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.batch.scheduler import Scheduler, StepSpeed, common_prefix
from engine.batch.step_plan import LARGEST_CHUNK
from engine.jobs import Job, SamplingParams
from tests.support.sampling import samples


def job(number: int, prompt: Sequence[int]) -> Job:
    return Job(
        id=number, prompt=tuple(prompt), max_tokens=9, sampling=SamplingParams(temperature=0)
    )


@dataclass
class Slots:
    """Memory for a fixed number of jobs."""

    free: int = 100
    joined_ids: list[int] = field(default_factory=list)

    def may_join(self, _: Job, /) -> bool:
        return self.free > len(self.joined_ids)

    def reserve(self, job: Job) -> None:
        self.joined_ids.append(job.id)


@dataclass
class Store:
    """A fake prefix cache."""

    held: list[tuple[int, ...]] = field(default_factory=list)

    def match(self, tokens: Sequence[int], salt: str = "") -> int:
        assert not salt, "the fake cache has no salts"
        best = 0
        for one in self.held:
            length = 0
            while length < min(len(one), len(tokens) - 1) and one[length] == tokens[length]:
                length += 1
            best = max(best, length)
        return best


def make_scheduler(*prompts: Sequence[int], free: int = 100) -> tuple[Scheduler, Store, Slots]:
    store, slots = Store(), Slots(free=free)
    scheduler = Scheduler(match=store.match, memory=slots)
    for number, prompt in enumerate(prompts):
        scheduler.add(job(number, prompt))
    return scheduler, store, slots


def numbers(count: int, first: int) -> list[int]:
    return list(range(first, first + count))


def test_a_long_prompt_is_read_in_pieces() -> None:
    scheduler, _, _ = make_scheduler(numbers(1001, 0))
    read = 0
    while chunks := scheduler.next_chunks(300):
        (chunk,) = chunks
        read += chunk.count
        assert chunk.is_last == (read == 1000)
        scheduler.set_position(0, read)
    assert read == 1000


def test_a_short_prompt_does_not_wait_for_the_whole_of_a_long_one() -> None:
    scheduler, _, _ = make_scheduler(numbers(10_000, 0))
    assert [chunk.job_id for chunk in scheduler.next_chunks(256)] == [0]
    scheduler.set_position(0, 256)
    scheduler.add(job(1, numbers(50, 20_000)))
    (next_chunk,) = scheduler.next_chunks(256)
    assert (next_chunk.job_id, next_chunk.is_last) == (1, True)


@pytest.mark.parametrize(("size", "share"), [(200, 0.5), (60, 0.2), (2, 0.2)])
def test_a_long_prompt_gets_on_beside_many_short_ones(size: int, share: float) -> None:
    scheduler, _, _ = make_scheduler(numbers(100_000, 0))
    read, steps = 0, 200
    for at in range(steps):
        scheduler.add(job(at + 1, numbers(size, 200_000 + 1000 * at)))
        for chunk in scheduler.next_chunks(256):
            if chunk.job_id == 0:
                read += chunk.count
                scheduler.set_position(0, read)
    assert read >= share * (steps - 4) * 256


def test_a_prompt_that_is_read_slowly_gets_small_pieces() -> None:
    scheduler, _, _ = make_scheduler(numbers(10_000, 0))
    sizes = []
    for pace in (0.25, 0.001, 3.0):
        scheduler.set_position(0, 100, pace)
        sizes.append(scheduler.next_chunks(256)[0].count)
    assert sizes == [64, 32, 256]


def test_prompts_of_equal_length_are_read_together() -> None:
    scheduler, _, _ = make_scheduler(*(numbers(61, 1000 * n) for n in range(10)))
    assert len(scheduler.next_chunks(256)) == 4
    assert len(scheduler.next_chunks(256)) == 4
    assert len(scheduler.next_chunks(256)) == 2
    assert scheduler.next_chunks(256) == ()


def test_a_prompt_with_a_shared_beginning_waits_for_the_other() -> None:
    head = numbers(200, 0)
    scheduler, store, _ = make_scheduler([*head, 1, 2], [*head, 3, 4])
    (first,) = scheduler.next_chunks(512)
    assert (first.job_id, first.count) == (0, 201)
    scheduler.add(job(2, numbers(40, 9000)))
    store.held.append((*head, 1, 2))
    scheduler.note_cache_change()
    rest = scheduler.next_chunks(512)
    # the other one is read in the same step or the next, and only what the cache lacks of it
    rest = (*rest, *scheduler.next_chunks(512))
    assert {chunk.job_id: chunk.count for chunk in rest} == {1: 1, 2: 39}


def test_a_prompt_does_not_wait_for_one_with_another_salt() -> None:
    head = numbers(200, 0)
    scheduler = Scheduler(match=lambda _tokens, _salt: 0, memory=Slots())
    for number, salt in enumerate(("alice", "bob")):
        one = job(number, [*head, number])
        scheduler.add(dataclasses.replace(one, cache_salt=salt))
    # Its wait would help neither, and would tell that somebody sends the same prompt.
    assert [chunk.job_id for chunk in scheduler.next_chunks(512)] == [0, 1]


def test_without_memory_later_prompts_do_not_overtake_the_first() -> None:
    scheduler, _, slots = make_scheduler(numbers(30, 0), free=1)
    assert [chunk.job_id for chunk in scheduler.next_chunks(512)] == [0]
    scheduler.add(job(1, numbers(30, 1000)))
    scheduler.add(job(2, numbers(2, 2000)))
    assert scheduler.next_chunks(512) == ()
    slots.free = 3
    assert sorted(
        chunk.job_id for chunk in (*scheduler.next_chunks(512), *scheduler.next_chunks(512))
    ) == [1, 2]


@settings(max_examples=samples(100), deadline=None)
@given(
    prompts=st.lists(
        st.tuples(st.integers(0, 3), st.integers(2, 400), st.integers(0, 400)), max_size=12
    ),
    budget=st.integers(16, 600),
)
def test_every_prompt_is_read_once_and_completely(
    prompts: list[tuple[int, int, int]], budget: int
) -> None:
    texts = [
        [*numbers(head, 100_000 * family), *numbers(tail + 1, 1_000_000 + 1000 * at)]
        for at, (family, head, tail) in enumerate(prompts)
    ]
    scheduler, store, _ = make_scheduler(*texts)
    read = dict.fromkeys(range(len(texts)), 0)
    done: list[int] = []
    for _ in range(2000):
        chunks = scheduler.next_chunks(budget)
        if not chunks:
            break
        assert len(chunks) == 1 or len(chunks) * max(chunk.count for chunk in chunks) <= budget
        for chunk in chunks:
            text = texts[chunk.job_id]
            start = read[chunk.job_id] or store.match(text)
            read[chunk.job_id] = start + chunk.count
            assert chunk.is_last == (read[chunk.job_id] >= len(text) - 1)
            store.held.append(tuple(text[: read[chunk.job_id]]))
            if chunk.is_last:
                done.append(chunk.job_id)
            else:
                scheduler.set_position(chunk.job_id, read[chunk.job_id])
        scheduler.note_cache_change()
    assert sorted(done) == list(range(len(texts)))


def test_a_piece_takes_as_long_as_some_tokens_of_a_stream() -> None:
    speed = StepSpeed(decode_s=0.075, prefill_tokens_per_s=1000)
    assert speed.chunk_tokens(running=2, waiting=1) == 300
    assert speed.chunk_tokens(running=1, waiting=1) == 300
    assert speed.chunk_tokens(running=0, waiting=1) == min(600, LARGEST_CHUNK)
    assert speed.chunk_tokens(running=2, waiting=1, factor=0) == 32
    assert StepSpeed(decode_s=0.01).chunk_tokens(running=2, waiting=1) == 50
    assert StepSpeed(decode_s=0.01).chunk_tokens(running=2, waiting=2) == 200, "within a second"
    assert StepSpeed(prefill_tokens_per_s=500).chunk_tokens(running=3, waiting=2) == 256
    crowd = StepSpeed(decode_s=0.05, prefill_tokens_per_s=400)
    assert crowd.chunk_tokens(running=1, waiting=2) == 512, "a pass of the best speed"
    crowd = StepSpeed(decode_s=0.05, prefill_tokens_per_s=100)
    assert crowd.chunk_tokens(running=1, waiting=2) == 200, "within two seconds"
    speed = StepSpeed(decode_s=5, prefill_tokens_per_s=100)
    assert speed.chunk_tokens(running=2, waiting=1) == 100
    assert StepSpeed(prefill_tokens_per_s=1).chunk_tokens(running=2, waiting=1) == 32


def test_streams_wait_longer_while_more_prompts_wait_than_run() -> None:
    speed = StepSpeed(decode_s=0.02)
    assert speed.stall_s(running=2, waiting=2) == 0.25
    assert speed.stall_s(running=2, waiting=3) == 0.5
    assert StepSpeed(decode_s=0.1).stall_s(running=2, waiting=3) == pytest.approx(1.6)
    assert StepSpeed(decode_s=5).stall_s(running=2, waiting=3) == 2.0
    assert StepSpeed(decode_s=0.1).stall_s(running=1, waiting=1) == pytest.approx(0.3)
    assert StepSpeed(decode_s=5).stall_s(running=1, waiting=1) == 1.0


@pytest.mark.parametrize(
    ("length", "counts"), [(301, [300]), (451, [450]), (452, [300, 151]), (901, [300, 300, 300])]
)
def test_a_short_end_is_read_with_the_piece_before_it(length: int, counts: list[int]) -> None:
    scheduler, _, _ = make_scheduler(list(range(length)))
    read = []
    while chunks := scheduler.next_chunks(300):
        read.append(chunks[0].count)
        scheduler.set_position(0, sum(read))
    assert read == counts


def test_a_long_end_is_no_larger_than_the_largest_piece() -> None:
    scheduler, _, _ = make_scheduler(list(range(LARGEST_CHUNK + 2)))
    assert scheduler.next_chunks(LARGEST_CHUNK)[0].count == LARGEST_CHUNK


def test_common_prefix() -> None:
    scheduler, _, _ = make_scheduler([1, 2, 3, 9], [1, 2, 4, 9], [1, 2, 3, 9, 9])
    one, other, longer = (waiting.tokens for waiting in scheduler.waiting)
    assert (common_prefix(one, other), common_prefix(one, longer), common_prefix(one, one)) == (
        2,
        3,
        3,
    )

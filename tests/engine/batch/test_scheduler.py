"""The scheduler: which prompts a step reads, in tables of situations and as a property."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field

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
    scheduler, _, _ = make_scheduler(numbers(10_000, 0), numbers(50, 20_000))
    first = scheduler.next_chunks(256)
    scheduler.set_position(0, 256)
    second = scheduler.next_chunks(256)
    assert [chunk.job_id for chunk in (*first, *second)] == [0, 1]
    assert second[0].is_last


def test_prompts_of_equal_length_are_read_together() -> None:
    scheduler, _, _ = make_scheduler(*(numbers(61, 1000 * n) for n in range(10)))
    assert len(scheduler.next_chunks(256)) == 4
    assert len(scheduler.next_chunks(256)) == 4
    assert len(scheduler.next_chunks(256)) == 2
    assert scheduler.next_chunks(256) == ()


def test_a_prompt_with_a_shared_beginning_waits_for_the_other() -> None:
    head = numbers(200, 0)
    scheduler, store, _ = make_scheduler([*head, 1, 2], [*head, 3, 4], numbers(40, 9000))
    (first,) = scheduler.next_chunks(512)
    assert (first.job_id, first.count) == (0, 201)
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
    scheduler, _, slots = make_scheduler(
        numbers(30, 0), numbers(30, 1000), numbers(2, 2000), free=1
    )
    assert [chunk.job_id for chunk in scheduler.next_chunks(512)] == [0]
    assert scheduler.next_chunks(512) == ()
    slots.free = 3
    assert sorted(
        chunk.job_id for chunk in (*scheduler.next_chunks(512), *scheduler.next_chunks(512))
    ) == [
        1,
        2,
    ]


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


def test_a_piece_takes_as_long_as_a_stall_may() -> None:
    speed = StepSpeed(decode_s=0.02, prefill_tokens_per_s=1000)
    assert speed.chunk_tokens(running=2, waiting=1) == 250
    assert speed.chunk_tokens(running=0, waiting=1) == LARGEST_CHUNK
    assert speed.chunk_tokens(running=2, waiting=1, factor=0) == 16
    speed = StepSpeed(decode_s=5, prefill_tokens_per_s=100)
    assert speed.chunk_tokens(running=2, waiting=1) == 100


def test_reading_goes_first_while_more_prompts_wait_than_run() -> None:
    speed = StepSpeed(decode_s=0.02, prefill_tokens_per_s=2000)
    assert speed.chunk_tokens(running=2, waiting=2) == 500
    assert speed.chunk_tokens(running=2, waiting=3) == LARGEST_CHUNK


def test_common_prefix() -> None:
    scheduler, _, _ = make_scheduler([1, 2, 3, 9], [1, 2, 4, 9], [1, 2, 3, 9, 9])
    one, other, longer = (waiting.tokens for waiting in scheduler.waiting)
    assert (common_prefix(one, other), common_prefix(one, longer), common_prefix(one, one)) == (
        2,
        3,
        3,
    )

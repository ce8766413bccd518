"""Which prompt is read next: pure, so in any situation that can be thought of."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from engine.batch.scheduler import Scheduler, StepSpeed, common_prefix
from engine.batch.step_plan import LARGEST_CHUNK
from engine.jobs import Job, SamplingParams


def job(number: int, prompt: Sequence[int]) -> Job:
    return Job(
        id=number, prompt=tuple(prompt), max_tokens=9, sampling=SamplingParams(temperature=0)
    )


@dataclass
class Slots:
    """Room for so many."""

    free: int = 100
    joined_ids: list[int] = field(default_factory=list)

    def may_join(self, _: Job, /) -> bool:
        return self.free > len(self.joined_ids)

    def joined(self, job: Job) -> None:
        self.joined_ids.append(job.id)


@dataclass
class Store:
    """What a prefix cache would bring."""

    held: list[tuple[int, ...]] = field(default_factory=list)

    def match(self, tokens: Sequence[int]) -> int:
        best = 0
        for one in self.held:
            length = 0
            while length < min(len(one), len(tokens) - 1) and one[length] == tokens[length]:
                length += 1
            best = max(best, length)
        return best


def scheduler(*prompts: Sequence[int], free: int = 100) -> tuple[Scheduler, Store, Slots]:
    store, slots = Store(), Slots(free=free)
    made = Scheduler(match=store.match, room=slots)
    for number, prompt in enumerate(prompts):
        made.add(job(number, prompt))
    return made, store, slots


def numbers(count: int, first: int) -> list[int]:
    return list(range(first, first + count))


def test_a_long_prompt_is_read_in_pieces() -> None:
    made, _, _ = scheduler(numbers(1001, 0))
    read = 0
    while chunks := made.next(300):
        (chunk,) = chunks
        read += chunk.count
        assert chunk.is_last == (read == 1000)
        made.has_read(0, read)
    assert read == 1000


def test_a_short_one_need_not_wait_for_all_of_a_long_one() -> None:
    made, _, _ = scheduler(numbers(10_000, 0), numbers(50, 20_000))
    first = made.next(256)
    made.has_read(0, 256)
    second = made.next(256)
    assert [chunk.job_id for chunk in (*first, *second)] == [0, 1]
    assert second[0].is_last


def test_those_of_a_length_are_read_together() -> None:
    made, _, _ = scheduler(*(numbers(61, 1000 * n) for n in range(10)))
    assert len(made.next(256)) == 4
    assert len(made.next(256)) == 4
    assert len(made.next(256)) == 2
    assert made.next(256) == ()


def test_who_begins_like_another_waits_for_it() -> None:
    head = numbers(200, 0)
    made, store, _ = scheduler([*head, 1, 2], [*head, 3, 4], numbers(40, 9000))
    (first,) = made.next(512)
    assert (first.job_id, first.count) == (0, 201)
    store.held.append((*head, 1, 2))
    made.stored()
    rest = made.next(512)
    # the other one is read in the same step or the next, and only what the cache lacks of it
    rest = (*rest, *made.next(512))
    assert {chunk.job_id: chunk.count for chunk in rest} == {1: 1, 2: 39}


def test_without_room_nobody_behind_takes_what_the_first_waits_for() -> None:
    made, _, slots = scheduler(numbers(30, 0), numbers(30, 1000), numbers(2, 2000), free=1)
    assert [chunk.job_id for chunk in made.next(512)] == [0]
    assert made.next(512) == ()
    slots.free = 3
    assert sorted(chunk.job_id for chunk in (*made.next(512), *made.next(512))) == [1, 2]


@settings(max_examples=100, deadline=None)
@given(
    prompts=st.lists(
        st.tuples(st.integers(0, 3), st.integers(2, 400), st.integers(0, 400)), max_size=12
    ),
    budget=st.integers(16, 600),
)
def test_every_prompt_is_read_once_and_to_its_end(
    prompts: list[tuple[int, int, int]], budget: int
) -> None:
    texts = [
        [*numbers(head, 100_000 * family), *numbers(tail + 1, 1_000_000 + 1000 * at)]
        for at, (family, head, tail) in enumerate(prompts)
    ]
    made, store, _ = scheduler(*texts)
    read = dict.fromkeys(range(len(texts)), 0)
    done: list[int] = []
    for _ in range(2000):
        chunks = made.next(budget)
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
                made.has_read(chunk.job_id, read[chunk.job_id])
        made.stored()
    assert sorted(done) == list(range(len(texts)))


def test_a_piece_is_as_long_as_a_stall_may_be() -> None:
    speed = StepSpeed(decode_s=0.02, prefill_tokens_per_s=1000)
    assert speed.chunk(running=2, waiting=1) == 250
    assert speed.chunk(running=0, waiting=1) == LARGEST_CHUNK
    assert speed.chunk(running=2, waiting=1, factor=0) == 16
    speed = StepSpeed(decode_s=5, prefill_tokens_per_s=100)
    assert speed.chunk(running=2, waiting=1) == 100


def test_while_more_wait_than_run_reading_comes_first() -> None:
    speed = StepSpeed(decode_s=0.02, prefill_tokens_per_s=2000)
    assert speed.chunk(running=2, waiting=2) == 500
    assert speed.chunk(running=2, waiting=3) == LARGEST_CHUNK


def test_common_beginnings() -> None:
    made, _, _ = scheduler([1, 2, 3, 9], [1, 2, 4, 9], [1, 2, 3, 9, 9])
    one, other, longer = (waiting.tokens for waiting in made.waiting)
    assert (common_prefix(one, other), common_prefix(one, longer), common_prefix(one, one)) == (
        2,
        3,
        3,
    )

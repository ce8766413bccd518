"""`fleetctl bench` measures a real engine through a real gateway, and compares runs."""

from pathlib import Path

import msgspec
import pytest

from fleetctl.chat.conversation import ChatAnswer
from fleetctl.chat.load_run import Load, quantile, summarize
from fleetctl.verbs.bench import BenchRun, run_text
from tests.support.fleetctl_runner import run_fleetctl
from tests.support.gateway_real_engine import in_front_of, tiny_engine

LOAD = Load(concurrency=2, prompt_tokens=64)


def answer(first_s: float, total_s: float, tokens: int = 11) -> ChatAnswer:
    return ChatAnswer(first_s=first_s, total_s=total_s, prompt_tokens=64, output_tokens=tokens)


def test_figures_are_sums_and_quantiles() -> None:
    result = summarize(LOAD, [answer(1, 2), answer(3, 5)], ["the queue is full"], 5.0)
    assert (result.requests, result.failed, result.error) == (3, 1, "the queue is full")
    assert (result.first_token_seconds_p50, result.first_token_seconds_p95) == (1, 3)
    # Ten tokens after the first one, in one and in two seconds.
    assert result.stream_tokens_per_second == 5
    assert result.output_tokens_per_second == pytest.approx(22 / 5)
    assert result.requests_per_second == pytest.approx(2 / 5)


def test_quantiles_are_values_that_were_measured() -> None:
    values = [float(n) for n in range(1, 101)]
    assert [quantile(values, share) for share in (0.0, 0.5, 0.95, 1.0)] == [1, 50, 95, 100]
    assert quantile([], 0.5) is None


def test_nothing_that_answered_has_no_figures() -> None:
    result = summarize(LOAD, [], ["gone"], 1.0)
    text = run_text(BenchRun(model="m", release="1", output_tokens=8, results=[result]), None)
    assert text.splitlines()[1].split() == ["2", "-", "-", "1", "1", "-", "-", "-", "0.0"]


def test_a_comparison_says_how_much_faster() -> None:
    before = summarize(LOAD, [answer(2, 4)], [], 4.0)
    now = summarize(LOAD, [answer(1, 2)], [], 2.0)
    runs = [
        BenchRun(model="m", release="1", output_tokens=8, results=[result])
        for result in (now, before)
    ]
    row = run_text(*runs).splitlines()[1]
    assert row.count("(x2.00)") == 4
    other = msgspec.structs.replace(runs[1], output_tokens=16)
    assert "throughputs cannot be compared" in run_text(runs[0], other)


@pytest.mark.ci
@pytest.mark.mlx
async def test_a_real_model_is_measured(tmp_path: Path) -> None:
    with tiny_engine(tmp_path) as engine:
        async with in_front_of(engine) as gateway:
            words: tuple[str, ...] = (
                "bench",
                "tiny",
                "--gateway",
                gateway.url,
                "--output-tokens",
                "8",
            )
            words += ("--concurrency", "1,4", "--prompt-tokens", "48", "--requests", "6")
            done = await run_fleetctl(*words, "-o", "json")
            assert done.code == 0, done.err
            run = msgspec.json.decode(done.out, type=BenchRun)
            assert [result.load.concurrency for result in run.results] == [1, 4]
            for result in run.results:
                assert (result.requests, result.failed, result.output_tokens) == (6, 0, 8)
                assert result.prompt_tokens == pytest.approx(48, abs=16)
                assert result.first_token_seconds_p50 is not None
                assert result.output_tokens_per_second > 0
            (tmp_path / "run.json").write_text(done.out)
            file = str(tmp_path / "run.json")
            again = await run_fleetctl("bench", "--read", file, "--compare", file)
            assert again.code == 0
            assert again.out.count("(x1.00)") == 8
            refused = await run_fleetctl("bench", "nope", "--gateway", gateway.url)
            assert refused.code == 1
            assert "'nope' does not exist" in refused.err

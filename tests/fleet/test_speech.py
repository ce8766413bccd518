"""A fleet that transcribes and speaks: the official client, through a gateway, to real engines that may die."""

import io
import subprocess
import sys
import time
import wave
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import openai
import pytest

from tests.support.fleet import Fleet, model_deployment, running_fleet
from tests.support.waiting import until_async

# mlx-audio brings dozens of packages: `make .venv-audio/.ready` makes an environment with them.
pytest.importorskip("mlx_audio", reason="mlx-audio is not here: run `make test-audio`")
speech_models = pytest.importorskip("tests.support.speech_models")
pytestmark = [pytest.mark.fleet, pytest.mark.mlx, pytest.mark.full, pytest.mark.timeout(300)]

ROUTE = """
apiVersion: fleet/v1alpha1
kind: ModelRoute
metadata: {name: whisper-1}
spec:
  model: whisper-1
  backends: [{deployment: ears, weight: 1}]
"""
SENTENCE = "Hello to you"
SAMPLES = 62 * 1920


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("models")
    for family in ("whisper", "pocket_tts"):
        command = [sys.executable, "-m", "tests.support.speech_models", family, folder / family]
        subprocess.run(command, check=True)
    return folder


@pytest.fixture
async def fleet(tmp_path: Path, models: Path) -> AsyncIterator[Fleet]:
    async with running_fleet(tmp_path, models) as fleet:
        for name, path in (("ears", "whisper"), ("voice", "pocket_tts")):
            await fleet.applied(model_deployment(name, model={"path": path}, concurrency=2))
        await fleet.applied(ROUTE)
        for name in ("ears", "voice"):
            await fleet.available(name, limit_s=120)
            await fleet.routed(name, 1)
        yield fleet


async def test_speech_goes_through_the_fleet(fleet: Fleet) -> None:
    async with connect(fleet) as client:
        await check_speech(client)
        await check_refusals(client, fleet, speech_models.recording())
        await check_death(client, fleet)
    made = await fleet.ctl("create", "apikey", "listener", "--model", "ears")
    async with connect(fleet, made.out.strip()) as client:
        heard = await client.audio.transcriptions.create(
            model="ears", file=speech_models.recording()
        )
        assert heard.text == speech_models.SPOKEN
        with pytest.raises(openai.PermissionDeniedError):
            await client.audio.speech.create(model="voice", voice="alba", input="x")
        with pytest.raises(openai.PermissionDeniedError):
            await client.audio.transcriptions.create(
                model="whisper-1", file=("a.wav", bytes(2 << 20))
            )


def connect(fleet: Fleet, key: str = "none") -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{fleet.url}/v1", api_key=key, max_retries=0)


async def check_speech(client: openai.AsyncOpenAI) -> None:
    path = speech_models.recording()
    for model in ("ears", "whisper-1"):
        heard = await client.audio.transcriptions.create(model=model, file=path)
        assert heard.text == speech_models.SPOKEN
    deltas = [
        event.type
        async for event in await client.audio.transcriptions.create(
            model="whisper-1", file=path, stream=True
        )
    ]
    assert deltas == ["transcript.text.delta", "transcript.text.done"]
    async with client.audio.speech.with_streaming_response.create(
        model="voice", voice="alba", input=SENTENCE, response_format="wav"
    ) as spoken:
        assert spoken.headers["content-type"] == "audio/wav"
        pieces = [piece async for piece in spoken.iter_bytes()]
    assert len(pieces) >= 3
    # The header does not know the length, as at OpenAI.
    with wave.open(io.BytesIO(b"".join(pieces))) as file:
        assert file.getframerate() == 24_000
    assert len(b"".join(pieces)) == 44 + 2 * SAMPLES


async def check_refusals(client: openai.AsyncOpenAI, fleet: Fleet, path: Path) -> None:
    with pytest.raises(openai.NotFoundError):
        await client.audio.transcriptions.create(model="nobody", file=path)
    with pytest.raises(openai.BadRequestError, match="no audio that can be read"):
        await client.audio.transcriptions.create(model="ears", file=("a.wav", b"no audio"))
    with pytest.raises(openai.BadRequestError, match="This model transcribes"):
        await client.chat.completions.create(
            model="ears", messages=[{"role": "user", "content": "x"}]
        )
    with pytest.raises(openai.BadRequestError, match="use /v1/audio/speech"):
        await client.audio.transcriptions.create(model="voice", file=path)
    with pytest.raises(openai.BadRequestError, match="no voice 'alloy'"):
        await client.audio.speech.create(model="voice", voice="alloy", input="x")
    with pytest.raises(openai.APIStatusError) as large:
        await client.audio.transcriptions.create(model="ears", file=("a.wav", bytes(26 << 20)))
    assert large.value.status_code == 413
    async with httpx.AsyncClient() as plain:
        answer = await plain.post(
            f"{fleet.url}/v1/audio/transcriptions",
            content=b"--X",
            headers={"content-type": "multipart/form-data; boundary=X"},
        )
        assert answer.status_code == 400
        assert "no valid form" in answer.json()["error"]["message"]


async def check_death(client: openai.AsyncOpenAI, fleet: Fleet) -> None:
    """Kill the engine in the middle of a file: its client sees that it is not whole, and the next one is served."""
    long = {"model": "voice", "voice": "alba", "input": "word " * 800, "response_format": "pcm"}
    async with httpx.AsyncClient(timeout=60) as plain:

        async def die() -> None:
            async with plain.stream("POST", f"{fleet.url}/v1/audio/speech", json=long) as answer:
                assert answer.status_code == 200
                async for _ in answer.aiter_raw():
                    fleet.kill_engines("node-1")

        with pytest.raises(httpx.RemoteProtocolError):
            await die()

        async def speaks() -> bool:
            short = {**long, "input": SENTENCE}
            answer = await plain.post(f"{fleet.url}/v1/audio/speech", json=short)
            return answer.status_code == 200 and len(answer.content) == 2 * SAMPLES

        await until_async(speaks, limit_s=60, what="speech after the engine's death")
        # A client that leaves frees the engine.
        async with plain.stream("POST", f"{fleet.url}/v1/audio/speech", json=long) as answer:
            await anext(answer.aiter_raw())
        started = time.perf_counter()
        assert await speaks()
        assert time.perf_counter() - started < 30
    heard = await client.with_options(max_retries=5).audio.transcriptions.create(
        model="ears", file=speech_models.recording()
    )
    assert heard.text == speech_models.SPOKEN

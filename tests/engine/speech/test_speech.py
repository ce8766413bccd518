"""Engines that transcribe and speak: a real whisper and a recording, and a tiny Pocket TTS, over HTTP."""

import base64
import io
import json
import struct
import subprocess
import sys
import threading
import wave
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from engine.memory.budget import PROCESS_BYTES
from models import model_files
from schemas.wire.exit_codes import ExitCode
from tests.support.engine_process import START_S, Engine, eventually, launching

# mlx-audio brings dozens of packages: `make .venv-audio/.ready` makes an environment with them.
pytest.importorskip("mlx_audio", reason="mlx-audio is not here: run `make test-audio`")
speech_models = pytest.importorskip("tests.support.speech_models")
soundfile = pytest.importorskip("soundfile")
pytestmark = [pytest.mark.mlx, pytest.mark.full]

SECONDS = 159_414 / 16_000
SENTENCE = "Hello to you"
"""3 words: the tiny voice makes 5 s of it, in 62 frames."""
SAMPLES = 62 * 1920


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("models")
    for family in ("whisper", "pocket_tts"):
        command = [sys.executable, "-m", "tests.support.speech_models", family, folder / family]
        subprocess.run(command, check=True)
    return folder


@pytest.fixture(scope="module")
def engines(models: Path, blas_cache: Path) -> Iterator[dict[str, Engine]]:
    folder = models.parent / "engines"
    folder.mkdir(exist_ok=True)
    with launching(folder, blas_cache) as start:
        started = {
            name: start(models / name, served_names=("tiny",), concurrency=2)
            for name in ("whisper", "pocket_tts")
        }
        for engine in started.values():
            eventually(engine.is_ready, within_s=START_S)
        yield started


@pytest.fixture
def whisper(engines: dict[str, Engine]) -> openai.OpenAI:
    return client(engines["whisper"])


@pytest.fixture
def voice(engines: dict[str, Engine]) -> openai.OpenAI:
    return client(engines["pocket_tts"])


def client(engine: Engine) -> openai.OpenAI:
    return openai.OpenAI(base_url=engine.url, api_key="none", max_retries=0)


def wav(samples: bytes, *, rate: int = 16_000, channels: int = 1) -> bytes:
    held = io.BytesIO()
    with wave.open(held, "wb") as file:
        file.setnchannels(channels)
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes(samples)
    return held.getvalue()


def spoken() -> bytes:
    with wave.open(str(speech_models.recording())) as file:
        return bytes(file.readframes(file.getnframes()))


def minutes(count: int) -> bytes:
    """Return the recording again and again, once in 30 s."""
    once = spoken()
    return wav((once + bytes(2 * 480_000 - len(once))) * 2 * count)


def test_a_recording_has_its_words_and_times(whisper: openai.OpenAI) -> None:
    path = speech_models.recording()
    answer = whisper.audio.transcriptions.create(model="tiny", file=path, language="en")
    assert answer.text == speech_models.SPOKEN
    assert answer.usage is not None
    assert answer.usage.model_dump() == {"type": "duration", "seconds": 10}
    verbose = whisper.audio.transcriptions.create(
        model="tiny",
        file=path,
        response_format="verbose_json",
        timestamp_granularities=["segment"],
    )
    assert (verbose.language, verbose.duration) == ("english", round(SECONDS, 2))
    assert verbose.segments is not None
    assert verbose.segments[0].text.strip() == "Ever tried, ever failed."
    assert all(a.end <= b.start < b.end <= SECONDS + 0.1 for a, b in pairwise(verbose.segments))


def test_the_formats_of_subtitles(whisper: openai.OpenAI) -> None:
    def ask(form: Any) -> str:
        path = speech_models.recording()
        return str(
            whisper.audio.transcriptions.create(model="tiny", file=path, response_format=form)
        )

    assert ask("text") == speech_models.SPOKEN + "\n"
    assert ask("srt").startswith(
        "1\n00:00:00,000 --> 00:00:03,000\nEver tried, ever failed.\n\n2\n00:00:03,000 --> "
    )
    assert ask("vtt").startswith(
        "WEBVTT\n\n00:00:00.000 --> 00:00:03.000\nEver tried, ever failed.\n\n"
    )


def test_windows_follow_each_other_in_a_stream_and_take_turns(
    whisper: openai.OpenAI, engines: dict[str, Engine]
) -> None:
    long = minutes(1)
    deltas: list[str] = []
    others: list[str] = []

    def ask_beside() -> None:
        path = speech_models.recording()
        others.append(whisper.audio.transcriptions.create(model="tiny", file=path).text)
        others.append(str(len(deltas)))

    beside = threading.Thread(target=ask_beside)
    events = whisper.audio.transcriptions.create(
        model="tiny", file=("long.wav", long), stream=True, temperature=0
    )
    text = ""
    for event in events:
        if event.type == "transcript.text.delta":
            if not deltas:
                beside.start()
            deltas.append(event.delta)
        elif event.type == "transcript.text.done":
            text = event.text
    beside.join(60)
    assert text == "".join(deltas)
    assert len(deltas) >= 2
    assert text.lower().count("fail better") >= 2
    assert others[0] == speech_models.SPOKEN
    assert engines["whisper"].busy() == (0, 0)


def test_a_client_that_leaves_frees_the_engine(engines: dict[str, Engine]) -> None:
    engine, long = engines["whisper"], minutes(10)
    stream = httpx.stream(
        "POST",
        f"{engine.url}/audio/transcriptions",
        files={"file": ("long.wav", long)},
        data={"model": "tiny", "stream": "true"},
        timeout=60,
    )
    with stream as response:
        assert next(response.iter_text()).startswith('data: {"type":"transcript.text.delta"')
        assert engine.busy() == (1, 0)
    eventually(lambda: engine.busy() == (0, 0))
    eventually(lambda: not engine.health().json["busy"])
    answer = client(engine).audio.transcriptions.create(
        model="tiny", file=speech_models.recording()
    )
    assert answer.text == speech_models.SPOKEN


def riff(size: int, layout: bytes, data_size: int, data: bytes) -> bytes:
    head = b"RIFF" + struct.pack("<I", size) + b"WAVEfmt " + struct.pack("<I", len(layout))
    return head + layout + b"data" + struct.pack("<I", data_size) + data


def layout(channels: int = 1, rate: int = 16_000, bits: int = 16, kind: int = 1) -> bytes:
    block = channels * bits // 8
    return struct.pack("<HHIIHH", kind, channels, rate, rate * block % 2**32, block % 2**16, bits)


FEW = b"\x01\x02" * 400
HOSTILE = {
    "nothing": b"",
    "text": b"not audio at all" * 100,
    "no channels": riff(100, layout(channels=0), 800, FEW),
    "65535 channels": riff(100, layout(channels=65_535), 800, FEW),
    "no rate": riff(100, layout(rate=0), 800, FEW),
    "no bits": riff(100, layout(bits=0), 800, FEW),
    "unknown codec": riff(100, layout(kind=0x1234), 800, FEW),
    "header alone": riff(36, layout(), 0, b""),
    "short layout": riff(30, b"\x01\x00", 0, b""),
    "cut short": wav(FEW)[:30],
    "too long": wav(b"", rate=1_000)[:-4] + struct.pack("<I", 20_000_000) + bytes(20_000_000),
    "flac of nothing": b"fLaC" + b"\xff" * 5_000,
    "mp3 of nothing": b"ID3\x04\x00\x00\x7f\x7f\x7f\x7f" + b"\xff" * 5_000,
    "ogg of nothing": b"OggS" + b"\xff" * 5_000,
}
LYING = {
    "2^32 bytes": riff(2**32 - 1, layout(), 2**32 - 1, FEW),
    "a rate of 2^31": riff(100, layout(rate=2**31), 800, FEW),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_files_are_refused(name: str, engines: dict[str, Engine]) -> None:
    engine = engines["whisper"]
    answer = httpx.post(
        f"{engine.url}/audio/transcriptions",
        files={"file": ("a.wav", HOSTILE[name])},
        data={"model": "tiny"},
        timeout=60,
    )
    assert answer.status_code == 400, (name, answer.text)
    assert answer.json()["error"]["param"] == "file"
    if name == "too long":
        assert answer.json()["error"]["code"] == "audio_too_long"
    assert engine.is_ready()


@pytest.mark.parametrize("name", LYING)
def test_headers_that_lie_do_no_harm(name: str, engines: dict[str, Engine]) -> None:
    engine = engines["whisper"]
    answer = httpx.post(
        f"{engine.url}/audio/transcriptions",
        files={"file": ("a.wav", LYING[name])},
        data={"model": "tiny"},
        timeout=60,
    )
    assert answer.status_code in (200, 400), answer.text
    assert engine.is_ready()
    assert engine.health().json["peakBytes"] < 2 << 30


def test_wrong_requests_are_refused_with_a_reason(
    whisper: openai.OpenAI, voice: openai.OpenAI, engines: dict[str, Engine]
) -> None:
    path, ask = speech_models.recording(), whisper.audio.transcriptions.create
    for fields, words in (
        ({"model": "other"}, "The model 'other' does not exist here"),
        ({"language": "tlh"}, "does not know the language 'tlh'; it knows en."),
        ({"response_format": "diarized_json"}, "Invalid 'response_format'"),
        ({"timestamp_granularities": ["word"]}, "words have none"),
        ({"temperature": 2}, "Invalid 'temperature'"),
        ({"extra_body": {"nonsense": "1"}}, "nonsense"),
    ):
        with pytest.raises(openai.APIStatusError, match=words):
            ask(**{"model": "tiny", "file": path, **fields})
    translated = httpx.post(
        f"{engines['whisper'].url}/audio/translations",
        files={"file": path.read_bytes()},
        data={"model": "tiny"},
        timeout=60,
    )
    assert "understands English only" in translated.json()["error"]["message"]
    with pytest.raises(openai.BadRequestError, match="This model transcribes"):
        whisper.chat.completions.create(model="tiny", messages=[])
    with pytest.raises(openai.BadRequestError, match="use /v1/audio/transcriptions"):
        whisper.audio.speech.create(model="tiny", input="x", voice="alba")
    error = engines["pocket_tts"].post("/v1/completions", prompt="x").error
    assert error["code"] == "model_speaks"
    with pytest.raises(openai.BadRequestError, match="no voice 'alloy'; it has alba, jean"):
        voice.audio.speech.create(model="tiny", input="x", voice="alloy")
    with pytest.raises(openai.BadRequestError, match="nothing to say"):
        voice.audio.speech.create(model="tiny", input=" ?! ", voice="alba")
    with pytest.raises(openai.BadRequestError, match="one speed"):
        voice.audio.speech.create(model="tiny", input="x", voice="alba", speed=2)
    with pytest.raises(openai.BadRequestError, match="input"):
        voice.audio.speech.create(model="tiny", input="x" * 4097, voice="alba")
    large = engines["whisper"].request(
        "POST",
        "/v1/audio/transcriptions",
        b"x" * (27 << 20),
        {"content-type": "multipart/form-data; boundary=X"},
    )
    assert large.status == 413


def test_a_text_is_spoken_in_every_format(voice: openai.OpenAI) -> None:
    def speak(form: Any, text: str = SENTENCE) -> bytes:
        answer = voice.audio.speech.create(
            model="tiny", input=text, voice="Alba", response_format=form
        )
        return answer.read()

    assert len(speak("pcm")) == 2 * SAMPLES
    assert len(speak("pcm", f"{SENTENCE}. {SENTENCE}!")) == 4 * SAMPLES
    assert set(speak("pcm")) != {0}
    for form in ("wav", "flac", "mp3", "opus"):
        samples, rate = soundfile.read(io.BytesIO(speak(form)))
        assert rate == 24_000, form
        assert SAMPLES <= len(samples) <= SAMPLES + 3000, form
        assert abs(samples).max() > 1e-3, form


def test_speech_is_streamed_as_it_is_made(engines: dict[str, Engine]) -> None:
    engine = engines["pocket_tts"]
    body: dict[str, Any] = {"model": "tiny", "input": SENTENCE, "response_format": "pcm"}
    with httpx.stream("POST", f"{engine.url}/audio/speech", json=body, timeout=60) as response:
        assert response.headers["content-type"] == "audio/pcm"
        assert len(list(response.iter_raw())) >= 5
    events = engine.post("/v1/audio/speech", **body, stream_format="sse").raw.decode()
    parts = [json.loads(line[6:]) for line in events.split("\n\n") if line.startswith("data: {")]
    audio = b"".join(base64.b64decode(p["audio"]) for p in parts if "audio" in p)
    assert (len(audio), parts[-1]["type"]) == (2 * SAMPLES, "speech.audio.done")
    assert events.endswith("data: [DONE]\n\n")
    # A client that leaves in the middle of a sentence.
    long = body | {"input": "word " * 800}
    with httpx.stream("POST", f"{engine.url}/audio/speech", json=long, timeout=60) as response:
        next(response.iter_raw())
    eventually(lambda: engine.busy() == (0, 0))
    assert engine.post("/v1/audio/speech", **body).status == 200


def test_the_engine_stays_within_its_memory_proof(
    whisper: openai.OpenAI, engines: dict[str, Engine], models: Path
) -> None:
    whisper.audio.transcriptions.create(model="tiny", file=speech_models.recording())
    for name, engine in engines.items():
        facts = model_files.inspect_model(models / name)
        shape = model_files.model_geometry(facts, casts_to_float32=sys.platform == "linux")
        proven = shape.weights_bytes + shape.work_bytes + PROCESS_BYTES
        assert engine.health().json["peakBytes"] < proven, name


def test_metrics_name_the_paths_of_speech(
    whisper: openai.OpenAI, engines: dict[str, Engine]
) -> None:
    whisper.audio.transcriptions.create(model="tiny", file=speech_models.recording())
    samples = engines["whisper"].metrics()
    ended = [n for n in samples if n.startswith("requests_total") and "transcriptions" in n]
    assert any('outcome="ok"' in name for name in ended), list(samples)


@pytest.mark.parametrize(
    ("spoil", "fields", "words"),
    [
        (lambda _: None, {"kv_cache": {"bits": 8}}, "has no use for kvCache"),
        (lambda _: None, {"memory_limit_bytes": 200 << 20}, "this model needs"),
        (lambda folder: (folder / "tokenizer.json").unlink(), {}, "make no speech model"),
        (lambda folder: (folder / "voices").rename(folder / "other"), {}, "has 0 voices"),
        (lambda _: None, {"ngram_tokens": 3}, "has no use for n-grams"),
    ],
)
def test_a_folder_or_a_setting_that_cannot_be_served_ends_the_engine(
    models: Path, blas_cache: Path, tmp_path: Path, spoil: Any, fields: Any, words: str
) -> None:
    folder = speech_models.make_pocket_tts(tmp_path / "model")
    spoil(folder)
    with launching(tmp_path, blas_cache) as start:
        engine = start(folder, **fields)
        assert engine.wait() == ExitCode.UNUSABLE
        assert words in engine.stderr.read_text()

"""From the quickstart's manifest to English, with the official client."""

import json
from pathlib import Path

import pytest
from openai import AsyncOpenAI

from tests.support.fleet import running_fleet

QUESTION = "What is the capital of France? Answer in one sentence."


@pytest.mark.fleet
@pytest.mark.timeout(240)
async def test_apply_available_chat(tmp_path: Path, smollm2: Path) -> None:
    async with running_fleet(tmp_path, smollm2) as fleet:
        done = await fleet.ctl("apply", "-f", "examples/quickstart")
        assert (done.code, done.out) == (0, "modeldeployment/smollm2 created\n"), done.err
        await fleet.available("smollm2", limit_s=120)
        await fleet.routed("smollm2", 2)
        client = AsyncOpenAI(base_url=f"{fleet.url}/v1", api_key="unused", max_retries=0)
        async with client:
            whole = await client.chat.completions.create(
                model="smollm2",
                messages=[{"role": "user", "content": QUESTION}],
                temperature=0,
                max_tokens=32,
            )
            answer = whole.choices[0].message.content or ""
            assert "Paris" in answer
            assert whole.choices[0].finish_reason == "stop"
            assert whole.usage is not None
            assert whole.usage.completion_tokens > 3

            pieces: list[str] = []
            async for chunk in await client.chat.completions.create(
                model="fast",  # a served name beside the deployment's own
                messages=[{"role": "user", "content": QUESTION}],
                temperature=0,
                max_tokens=32,
                stream=True,
            ):
                pieces.extend(choice.delta.content or "" for choice in chunk.choices)
            assert "".join(pieces) == answer
            assert len([piece for piece in pieces if piece]) > 3

            assert {model.id async for model in client.models.list()} == {"smollm2", "fast"}

        words = ("-m", QUESTION, "--temperature", "0", "--max-tokens", "32", "--stats")
        # By the gateway that the store knows of.
        asked = await fleet.ctl("chat", "fast", *words)
        assert (asked.code, asked.out) == (0, f"{answer}\n"), asked.err
        assert f", {whole.usage.completion_tokens} output tokens, " in f", {asked.err}"
        assert ", smollm2-" in asked.err
        top = await fleet.ctl("top", "models", "--over", "200ms", "-o", "json")
        assert (top.code, top.err) == (0, "")
        [row] = json.loads(top.out)["items"]
        assert (row["name"], row["ready"], row["inFlight"], row["queue"]) == ("smollm2", 2, 0, 0)
        assert row["memoryBytes"] > 400 << 20  # two replicas' weights
        assert row["partial"] == []
        nodes = await fleet.ctl("top", "nodes", "--over", "200ms", "--no-headers")
        assert (nodes.code, nodes.err, nodes.out.split()[0]) == (0, "", "node-1")
        assert "?" not in nodes.out

        unchanged = await fleet.ctl("apply", "-f", "examples/quickstart")
        assert unchanged.out == "modeldeployment/smollm2 unchanged\n"

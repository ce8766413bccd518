"""Chat in a real browser: who answered, what is kept, edits, reasoning, tools, images, and models side by side."""

import ast
import asyncio
import base64
from collections.abc import AsyncIterator
from typing import Any

import orjson
import pytest
from playwright.async_api import Browser, FilePayload, Page, Route, expect

from gateway.limits import GatewayLimits
from schemas.autoscaling import LoadForecast
from schemas.deployment import ModelDeploymentStatus
from schemas.vision import Vision
from store.memory import MemoryTransport
from tests.support.browser import check_access, needs_browser, open_page
from tests.support.dashboard_site import Site, running_site
from tests.support.dashboards import CLOCK, running_dashboard
from tests.support.gateway_calls import scaled_to_zero
from tests.support.gateway_engine_scripts import DONE, delta
from tests.support.gateway_fake_engine import Call, FakeEngine, running
from tests.support.gateway_world import World, deployment, published, running_gateway
from tests.support.macs import mac

pytestmark = [needs_browser, pytest.mark.browser]

# One red pixel.
PNG = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAIAAACQd1PeAAAADElEQVR4nGP4z8AAAAMBAQDJ/pLvAAAAAElFTkSuQmCC"
)
CALL = {"index": 0, "id": "call-1", "type": "function", "function": {"name": "weather"}}
ARGUMENTS = {"index": 0, "function": {"arguments": '{"city": "Berlin"}'}}
USAGE = {
    "prompt_tokens": 31,
    "completion_tokens": 18,
    "total_tokens": 49,
    "prompt_tokens_details": {"cached_tokens": 16},
}


@pytest.fixture(scope="module")
async def site() -> AsyncIterator[Site]:
    async with running_site() as found:
        yield found


def part(**fields: Any) -> bytes:
    """Return an event with a part of an answer."""
    choice = {"index": 0, "delta": fields, "finish_reason": None}
    return b"data: " + orjson.dumps({"id": "chatcmpl-1", "choices": [choice]}) + b"\n\n"


async def thinks_and_calls(call: Call) -> None:
    """Reason and call a tool; answer with the result of the call, if there is one."""
    last = orjson.loads(call.body)["messages"][-1]
    await call.begin_stream()
    if last["role"] == "tool":
        await call.chunk(delta(f"It is {last['content']} there."))
    else:
        await call.chunk(part(reasoning_content="The user wants the weather."))
        await call.chunk(part(tool_calls=[CALL]))
        await call.chunk(part(tool_calls=[ARGUMENTS]))
    await call.chunk(b"data: " + orjson.dumps({"choices": [], "usage": USAGE}) + b"\n\n")
    await call.chunk(DONE)
    await call.send(b"0\r\n\r\n")


async def counts_messages(call: Call) -> None:
    """Answer with the number of messages, and of images in the last one."""
    messages = orjson.loads(call.body)["messages"]
    content = messages[-1]["content"]
    images = sum(one["type"] == "image_url" for one in content) if isinstance(content, list) else 0
    await call.begin_stream()
    await call.chunk(delta(f"{len(messages)} messages, {images} images"))
    await call.chunk(DONE)
    await call.send(b"0\r\n\r\n")


async def ask(page: Page, question: str) -> None:
    await page.get_by_label("Message", exact=True).fill(question)
    await page.keyboard.press("Enter")


async def test_a_question_waits_for_the_models_or_stays_where_it_was_typed(
    browser: Browser, site: Site
) -> None:
    asked = asyncio.Event()
    may_answer = asyncio.Event()

    async def hold(route: Route) -> None:
        asked.set()
        await may_answer.wait()
        await route.continue_()

    async with open_page(browser, site.url) as (page, _):
        await page.route("**/chat/v1/models", lambda route: route.abort())
        await page.goto("/chat")
        await ask(page, "Hi")
        await expect(page.get_by_role("alert")).to_be_visible()
        await expect(page.locator("textarea")).to_have_value("Hi")
        await page.unroute("**/chat/v1/models")
        await page.route("**/chat/v1/models", hold)
        await page.locator("textarea").press("Enter")
        await asked.wait()
        await expect(page.get_by_text("The question is sent when")).to_be_visible()
        may_answer.set()
        await expect(page.locator("[data-trace]")).to_contain_text("qwen-0")
        await expect(page.locator(".question")).to_contain_text("Hi")
        await expect(page.locator("textarea")).to_have_value("")
        await expect(page.get_by_role("alert")).to_have_count(0)


async def test_the_field_for_a_key_is_shown_where_the_gateway_asks_for_one(
    browser: Browser, site: Site
) -> None:
    refusal = {"error": {"message": "This gateway requires an API key."}}
    async with open_page(browser, site.url) as (page, _):
        await page.goto("/chat")
        await expect(page.get_by_label("API key")).to_have_count(0)
        await page.route("**/chat/v1/models", lambda route: route.fulfill(status=401, json=refusal))
        await page.reload()
        await expect(page.get_by_role("alert")).to_contain_text("requires an API key")
        await expect(page.get_by_label("API key")).to_be_visible()


async def test_a_turn_is_edited_regenerated_and_kept(browser: Browser) -> None:
    async with running_site() as site, running(FakeEngine("count-0", counts_messages)) as engine:
        await World(site.store).serve("count", engine)
        await site.gateway.knows("count", ready=1)
        async with open_page(browser, site.url) as (page, _):
            await page.goto("/models/count")
            await page.get_by_role("link", name="Chat with it").click()
            await expect(page.get_by_label("Model")).to_have_value("count")
            # An example is a question of one click.
            await page.locator(".example").first.click()
            answers = page.locator("[data-answer]")
            await expect(answers).to_contain_text(["1 messages"])
            await expect(page.locator("[data-trace]")).to_contain_text(
                "answered by count-0 on mac-1"
            )
            # A screen reader hears the answer when it is whole.
            said = page.locator("main [data-announced]")
            await expect(said).to_contain_text("1 messages, 0 images")
            await ask(page, "two")
            await expect(answers).to_contain_text(["1 messages", "3 messages"])
            await page.get_by_role("button", name="Regenerate").click()
            await expect(page.get_by_role("button", name="Send")).to_be_visible()
            await expect(answers).to_contain_text(["1 messages", "3 messages"])
            # Another model has a conversation of its own; this one is still there after a reload.
            await page.get_by_label("Model").select_option("qwen")
            await expect(page.locator(".turns > li")).to_have_count(0)
            await page.reload()
            await expect(page.get_by_label("Model")).to_have_value("qwen")
            await page.get_by_label("Model").select_option("count")
            await expect(answers).to_contain_text(["1 messages", "3 messages"])
            await page.get_by_role("button", name="Edit").first.click()
            await page.get_by_label("Edited message").fill("instead")
            await page.get_by_role("button", name="Send again").click()
            await expect(answers).to_contain_text(["1 messages"])
            await expect(page.locator(".question")).to_contain_text("instead")
            await page.get_by_role("button", name="New conversation").click()
            await page.reload()
            await expect(page.locator(".about")).to_be_visible()


async def test_the_end_of_an_answer_is_above_the_message_on_a_phone(browser: Browser) -> None:
    async with running_site() as site, running(FakeEngine("count-0", counts_messages)) as engine:
        await World(site.store).serve("count", engine)
        await site.gateway.knows("count", ready=1)
        async with open_page(browser, site.url, width=390) as (page, _):
            await page.goto("/models/count")
            await page.get_by_role("link", name="Chat with it").click()
            await expect(page.get_by_label("Model")).to_have_value("count")
            for number in range(5):
                await ask(page, f"question {number}")
                await expect(page.locator("[data-trace]")).to_have_count(number + 1)
                await expect(page.get_by_role("button", name="Send")).to_be_visible()
            assert await page.evaluate("scrollY") > 0
            end = await page.get_by_role("button", name="Regenerate").bounding_box()
            field = await page.get_by_label("Message", exact=True).bounding_box()
            assert end is not None
            assert field is not None
            assert end["y"] + end["height"] <= field["y"]


async def test_reasoning_tool_calls_and_cached_tokens_are_shown(browser: Browser) -> None:
    async with (
        running_site() as site,
        running(FakeEngine("thinker-0", thinks_and_calls)) as engine,
    ):
        await World(site.store).serve("thinker", engine)
        await site.gateway.knows("thinker", ready=1)
        async with open_page(browser, site.url) as (page, _):
            await page.goto("/chat?model=thinker")
            await ask(page, "Weather?")
            await expect(page.locator(".tool-call")).to_contain_text('weather({"city": "Berlin"})')
            trace = page.locator("[data-trace]")
            await expect(trace).to_contain_text("31 tokens in (16 cached), 18 out")
            await page.get_by_text("Reasoning").click()
            await expect(page.get_by_text("The user wants the weather.")).to_be_visible()
            await page.get_by_label("Result of weather").fill("sunny")
            await check_access(page)
            await page.keyboard.press("Enter")
            answer = page.locator("[data-answer]").last
            await expect(answer).to_contain_text("It is sunny there.")
            await page.get_by_role("button", name="Use from code").click()
            code = page.locator("[data-code]")
            await expect(code).to_contain_text("curl ")
            await page.get_by_role("button", name="Python", exact=True).click()
            await expect(code).to_contain_text("from openai import OpenAI")
            text = await code.inner_text()
            ast.parse(text)
            assert '"tool_call_id": "call-1"' in text


async def test_images_are_offered_where_the_model_takes_them(browser: Browser) -> None:
    async with running_site() as site, running(FakeEngine("eyes-0", counts_messages)) as engine:
        blind = deployment("eyes")
        model = blind.spec.model.model_copy(update={"vision": Vision(max_images=2)})
        seeing = blind.model_copy(update={"spec": blind.spec.model_copy(update={"model": model})})
        await World(site.store).put(seeing, published(engine, "eyes"))
        await site.gateway.knows("eyes", ready=1)
        async with open_page(browser, site.url) as (page, _):
            await page.goto("/chat?model=qwen")
            await expect(page.locator(".about")).to_be_visible()
            await expect(page.get_by_text("Attach images")).to_have_count(0)
            await page.goto("/chat?model=eyes")
            files = page.get_by_label("Attach images")
            image = FilePayload(name="red.png", mimeType="image/png", buffer=PNG)
            await files.set_input_files([image])
            await expect(page.get_by_role("img", name="Attached image 1")).to_be_visible()
            await ask(page, "What is it?")
            await expect(page.locator("[data-answer]")).to_contain_text("1 messages, 1 images")
            await check_access(page)
            await files.set_input_files([image, image])
            await expect(page.get_by_role("alert")).to_contain_text("1 more can be attached")
            await files.set_input_files(
                FilePayload(name="a.png", mimeType="image/png", buffer=b"no image")
            )
            await expect(page.get_by_role("alert")).to_contain_text("not an image")


_KEPT = """async () => {
  const [link] = document.querySelectorAll('link[rel=modulepreload]');
  const { keptText, newTurn, requestOf, restored } = await import(link.href.replace(/vendor.*/, 'conversation.js'));
  const turn = (question, answer) => ({ ...newTurn({ question }), answer, isOver: true });
  const refused = { ...newTurn({ question: 'refused' }), problem: 'no', isOver: true };
  const turns = { a: [turn('1', 'x'.repeat(300)), turn('2', 'y')], b: [newTurn({ question: '3' })] };
  return [
    Object.values(restored(keptText({}, turns, 700)).turns).map((of) => of.map((one) => one.question).join()),
    keptText({}, turns, 10),
    restored(keptText({}, turns)).turns.b[0].note,
    ['', '{', '{"turns": 1}', null].map((text) => Object.keys(restored(text).turns).length),
    requestOf({ model: 'm', system: 's' }, [turn('1', 'x'), refused, newTurn({ question: '2' })]).messages.map((one) => one.content).join(),
  ];
}"""


async def test_what_is_kept_is_bounded_and_what_failed_is_not_sent(
    browser: Browser, site: Site
) -> None:
    async with open_page(browser, site.url) as (page, _):
        await page.goto("/chat")
        fitting, nothing, note, broken, sent = await page.evaluate(_KEPT)
        # The oldest turn of the longest conversation goes first.
        assert fitting == ["2", "3"]
        assert orjson.loads(nothing)["turns"] == {"a": [], "b": []}
        assert note == "The page was left before the end of this answer."
        assert broken == [0, 0, 0, 0]
        assert sent == "s,1,x,2"


async def test_a_question_waits_for_a_model_that_loads(browser: Browser) -> None:
    """The note of the gateway says for what; who answered is known at the end."""
    store = MemoryTransport(CLOCK)
    limits = GatewayLimits(drain_timeout_s=0.0, hold_timeout_s=60.0, keep_alive_s=0.2)
    world = World(store)
    await store.commit([], mac("mac-1"))
    await world.put(scaled_to_zero("late"))
    forecast = LoadForecast(seconds=400, since=CLOCK.now(), gives_way=("qwen-0",))
    await world.put_status("late", ModelDeploymentStatus(loading=forecast))
    async with (
        running_gateway(store, limits) as gateway,
        running(FakeEngine("late-0", counts_messages)) as engine,
        running_dashboard(store) as dashboard,
        open_page(browser, dashboard.url) as (page, _),
    ):
        await gateway.knows("late", ready=0)
        await page.goto("/chat?model=late")
        availability = page.locator("[data-availability]")
        await expect(availability).to_contain_text("late loads in about 400 s: qwen-0 gives way.")
        await ask(page, "Hi")
        await expect(page.locator(".turns")).to_contain_text("s: qwen-0 gives way")
        await world.put(published(engine, "late"))
        await expect(page.locator("[data-answer]")).to_contain_text("1 messages")
        await expect(page.locator("[data-trace]")).to_contain_text("answered by late-0 on mac-1")


MARKDOWN = """# Title
A *word* and `code`, [a site](https://example.com/x), [no site](javascript:window.hacked=1) &amp; more

1. one
2. two

| a | b |
|---|--:|
| 1 | 2 |

```html
<b>text</b>
```
<img src=x onerror="window.hacked=1">"""


async def markdown_answer(call: Call) -> None:
    await call.begin_stream()
    await call.chunk(delta(MARKDOWN))
    await call.chunk(DONE)
    await call.send(b"0\r\n\r\n")


async def test_markdown_is_nodes_of_the_page_and_two_models_answer_side_by_side(
    browser: Browser,
) -> None:
    async with running_site() as site, running(FakeEngine("prose-0", markdown_answer)) as engine:
        await World(site.store).serve("prose", engine)
        await site.gateway.knows("prose", ready=1)
        async with open_page(browser, site.url) as (page, faults):
            await page.goto("/chat?model=prose")
            await page.get_by_role("button", name="Compare two models").click()
            await page.get_by_label("Compared with").select_option("qwen")
            await page.fill("textarea", "Hi")
            await page.keyboard.press("Enter")
            prose = page.get_by_role("region", name="prose").locator("[data-answer]")
            other = page.get_by_role("region", name="qwen").locator("[data-answer]")
            await expect(other).to_contain_text("Hello")
            await expect(prose.locator("h3")).to_have_text("Title")
            await expect(prose.locator("em")).to_have_text("word")
            await expect(prose.locator("ol li")).to_have_count(2)
            await expect(prose.locator("td.number")).to_have_text("2")
            await expect(prose.locator("pre code")).to_have_text("<b>text</b>")
            await expect(prose).to_contain_text('<img src=x onerror="window.hacked=1">')
            await expect(prose).to_contain_text("& more")
            links = await prose.locator("a").evaluate_all("(all) => all.map((one) => one.href)")
            assert links == ["https://example.com/x"]
            assert await prose.locator("img").count() == 0
            assert await page.evaluate("window.hacked") is None
            await check_access(page)
            await page.get_by_role("button", name="Use from code").click()
            assert faults.found == []

"""The page in a real browser: a prompt is typed, its coloured answer streams, the board moves."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from foretoken import LLM, SpecConfig
from foretoken.backend.local import LocalBackend
from foretoken.engine.async_engine import AsyncEngine
from foretoken.server.api.app import create_app
from foretoken.server.api.config import ApiConfig
from foretoken.server.page.page import page_router, stats_router
from tests.server.serving import FOLDER, chromium, opened_browser, served

pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
pytestmark = pytest.mark.skipif(chromium() is None, reason="no Chromium: run scripts/get_browser.sh")

PROMPT = "def add(a, b):\n    return a + b\n\n\ndef subtract(a, b):\n"
ANSWERED = ".turn:last-child .pane:last-child .answer[aria-busy=false]"
PICTURES = os.environ.get("FORETOKEN_PICTURES")  # the folder of the pictures of the documentation, to take them anew


@pytest.fixture(scope="module")
def engine() -> Iterator[AsyncEngine]:
    spec = SpecConfig("draft_model", draft="reference:draft", num_draft=4)
    with LLM("reference:target", spec, dtype="float32", profile="off") as llm, AsyncEngine(llm) as engine:
        yield engine


@pytest.fixture(scope="module")
def url(engine: AsyncEngine) -> Iterator[str]:
    backend = LocalBackend(engine, "reference")
    mix = SpecConfig("mix", parts=("ngram", SpecConfig("draft_model", draft="reference:draft")))
    with served(create_app(backend, ApiConfig(specs=(mix,)), routers=(page_router(), stats_router))) as address:
        yield address


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with opened_browser() as found:
        yield found


@pytest.fixture
def context(browser: Any) -> Iterator[Any]:
    with browser.new_context(viewport={"width": 1280, "height": 900}) as found:
        yield found


@pytest.fixture
def page(context: Any, url: str) -> Iterator[Any]:
    """The page, opened; a script error or something that its policy blocks fails the test."""
    found = context.new_page()
    found.set_default_timeout(10_000)
    problems: list[str] = []
    found.on("pageerror", lambda error: problems.append(str(error)))
    found.on("console", lambda line: problems.append(line.text) if "Content Security" in line.text else None)
    found.goto(url)
    found.wait_for_selector("#model:has-text('reference')")
    yield found
    assert problems == []


def ask(page: Any, prompt: str = PROMPT, max_tokens: int = 48, **fields: str) -> None:
    page.evaluate("document.getElementById('settings').open = true")
    page.fill("[name=max_tokens]", str(max_tokens))
    for name, value in fields.items():
        page.fill(f"[name={name}]", value)
    page.fill("#prompt", prompt)
    page.press("#prompt", "Control+Enter")


def mode(page: Any, name: str) -> None:
    page.check(f"input[name=mode][value={name}]", force=True)


def text_of(url: str, **body: Any) -> str:
    usual = {"prompt": PROMPT, "max_tokens": 48, "temperature": 0}
    answer = httpx2.post(f"{url}/v1/completions", json=usual | body, timeout=60)
    return str(answer.json()["choices"][0]["text"])


def test_a_prompt_gets_a_streamed_coloured_answer(page: Any, url: str) -> None:
    page.evaluate(
        "window.grown = 0;"
        "new MutationObserver(() => window.grown++).observe(document.getElementById('turns'), "
        "{childList: true, subtree: true})"
    )
    ask(page)
    page.wait_for_selector(ANSWERED)
    assert page.text_content(ANSWERED) == text_of(url)
    kinds = {name.split()[1] for name in page.eval_on_selector_all(".answer .tok", "all => all.map(e => e.className)")}
    assert "model" in kinds
    assert kinds & {"residual", "bonus"}
    assert page.evaluate("window.grown") > 5  # it came in pieces
    assert re.search(r"\d tokens/s", page.text_content(".pane .speed"))
    assert re.search(r"48 tokens in \d+ steps .* draft tokens accepted", page.text_content(".pane .detail"))
    colours = page.eval_on_selector(".answer .tok.model", "e => getComputedStyle(e).textDecorationLine")
    assert colours == "underline"


def test_text_that_needs_several_tokens_a_character_stays_whole(page: Any, url: str) -> None:
    ask(page, "# été 漢字 🙂 été 漢字 🙂 été 漢字", 32)
    page.wait_for_selector(ANSWERED)
    assert page.text_content(ANSWERED) == text_of(url, prompt="# été 漢字 🙂 été 漢字 🙂 été 漢字", max_tokens=32)


def test_plain_and_speculative_side_by_side(page: Any) -> None:
    mode(page, "both")
    ask(page)
    page.wait_for_selector(".verdict:has(b)")
    assert re.search(
        r"ran at \d+\.\d\dx the speed of plain\. The two texts are the same", page.text_content(".verdict")
    )
    plain, speculative = page.locator(".pane").all()
    assert plain.locator(".tok.model").count() == 0
    assert speculative.locator(".tok.model").count() > 0
    assert plain.locator(".answer").text_content() == speculative.locator(".answer").text_content()


def test_both_together_say_that_they_shared_a_batch(page: Any) -> None:
    mode(page, "both")
    page.evaluate("document.getElementById('settings').open = true")
    page.select_option("[name=turns]", "together")
    ask(page)
    page.wait_for_selector(".verdict:has(b)")
    assert "Both ran in one batch" in page.text_content(".verdict")


def test_a_model_with_a_template_has_conversations(context: Any, url: str) -> None:
    """The reference model has none, so the description of the model and the answers are made here."""
    sent: list[Any] = []

    def describe(route: Any) -> None:
        answer = route.fetch()
        found = answer.json()
        found["model"]["has_chat_template"] = True
        route.fulfill(response=answer, json=found)

    def reply(route: Any) -> None:
        sent.append(route.request.post_data_json["messages"])
        emitted = [{"id": 5, "text": f"reply {len(sent)}", "drafter": "ngram", "kind": "accepted", "p_accept": 0.5}]
        chunk = {"foretoken": {"trace": [{"step": 0, "emitted": emitted}]}}
        chunk["choices"] = [{"index": 0, "delta": {"content": f"reply {len(sent)}"}}]  # type: ignore[assignment]
        body = f"data: {json.dumps(chunk)}\n\ndata: [DONE]\n\n"
        route.fulfill(content_type="text/event-stream", body=body)

    page = context.new_page()
    page.route("**/v1/stats", describe)
    page.route("**/v1/chat/completions", reply)
    page.goto(url)
    page.wait_for_selector("#prompt-label:has-text('Message')")
    for number in (1, 2):
        page.fill("#prompt", f"question {number}")
        page.press("#prompt", "Enter")
        page.wait_for_selector(f".answer[aria-busy=false]:has-text('reply {number}')")
        assert page.input_value("#prompt") == ""
    first = [{"role": "user", "content": "question 1"}]
    assert sent[0] == first
    assert sent[1] == [*first, {"role": "assistant", "content": "reply 1"}, {"role": "user", "content": "question 2"}]
    assert page.locator(".answer .tok.lookup").count() == 2


def test_a_character_of_several_tokens_belongs_to_the_first(page: Any) -> None:
    emitted = [
        {"id": 1, "text": "\ufffd", "bytes": [0xC3], "drafter": None, "kind": "plain"},
        {"id": 2, "text": "\ufffd!", "bytes": [0xA9, 0x21], "drafter": "ngram", "kind": "accepted"},
    ]
    steps = [{"step": number, "emitted": [token]} for number, token in enumerate(emitted)]
    chunks = [
        {"choices": [{"index": 0, "text": ""}], "foretoken": {"trace": steps[:1]}},
        {"choices": [{"index": 0, "text": "é!"}], "foretoken": {"trace": steps[1:]}},
    ]
    body = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n"
    page.route("**/v1/completions", lambda route: route.fulfill(content_type="text/event-stream", body=body))
    ask(page)
    page.wait_for_selector(ANSWERED)
    assert page.eval_on_selector_all(".answer .tok", "all => all.map(e => [e.className, e.textContent])") == [
        ["tok plain", "é"],
        ["tok lookup", "!"],
    ]


def test_the_board_moves(page: Any) -> None:
    ask(page, max_tokens=96)
    page.wait_for_selector(ANSWERED)
    page.wait_for_selector("#figures :text('draft_model')")
    shown = page.text_content("#figures")
    for words in (
        "tokens/s",
        "running",
        "waiting",
        "batch",
        "Time, by phase",
        "target",
        "Controller",
        "of rounds with",
    ):
        assert words in shown, words
    assert page.text_content("#board-state") == "ready"


def test_tokens_explain_themselves_to_the_keyboard(page: Any) -> None:
    ask(page)
    page.wait_for_selector(ANSWERED)
    page.focus(".answer")
    page.keyboard.press("Home")
    assert "target" in page.text_content(".pane .detail")
    page.keyboard.press("ArrowRight")
    assert re.search(r"step \d+.* id \d+", page.text_content(".pane .detail"))
    assert page.locator(".tok.current").count() == 1
    page.hover(".tok.model >> nth=0")
    assert re.search(r"drafter draft_model · accepted with probability [01]\.\d+", page.text_content(".pane .detail"))


def test_a_conversation_needs_no_mouse(page: Any) -> None:
    for _ in range(3):
        page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.id") == "theme"
    page.focus("#prompt")
    page.keyboard.insert_text("x = 1\n")
    page.keyboard.press("Control+Enter")
    page.wait_for_selector(ANSWERED)


def test_stop_ends_the_answer_and_frees_the_engine(page: Any, url: str) -> None:
    ask(page, max_tokens=1500, temperature="1")
    page.wait_for_selector(".tok")
    page.click("#stop")
    page.wait_for_selector(".detail:has-text('ended: stopped')")
    while httpx2.get(f"{url}/v1/stats").json()["engine"]["num_running"]:
        page.wait_for_timeout(20)
    assert page.locator("#error").is_hidden()
    assert page.is_enabled("#send")


def test_errors_are_said_in_words_and_their_field_is_marked(page: Any) -> None:
    ask(page, temperature="-5")
    page.wait_for_selector("#error:visible")
    assert page.text_content("#error").startswith("The server refuses this request: ")
    assert "temperature" in page.text_content("#error")
    assert page.get_attribute("[name=temperature]", "aria-invalid") == "true"


@pytest.mark.parametrize(
    ("status", "said"),
    [(401, "requires an API key"), (429, "is full"), (503, "takes no requests now"), (500, "failed inside the server")],
)
def test_every_refusal_has_its_words(page: Any, status: int, said: str) -> None:
    body = '{"error": {"message": "<b>why</b>", "type": "t", "param": null, "code": null}}'
    page.route("**/v1/completions", lambda route: route.fulfill(status=status, body=body))
    ask(page)
    page.wait_for_selector("#error:visible")
    assert said in page.text_content("#error")
    assert page.text_content("#error").endswith(": <b>why</b>")
    assert page.locator("#error b").count() == 0


def test_an_error_in_mid_stream_is_said(page: Any) -> None:
    stream = 'data: {"choices": [{"index": 0, "text": "half"}]}\n\ndata: {"error": {"message": "the engine died"}}\n\n'
    page.route("**/v1/completions", lambda route: route.fulfill(content_type="text/event-stream", body=stream))
    ask(page)
    page.wait_for_selector("#error:visible")
    assert "the engine died" in page.text_content("#error")
    assert page.text_content(".answer") == "half"


def test_what_users_and_models_write_stays_text(page: Any) -> None:
    hostile = "<img src=x onerror=alert(1)><script>alert(2)</script>"
    stream = f'data: {{"choices": [{{"index": 0, "text": "{hostile}"}}]}}\n\ndata: [DONE]\n\n'
    page.route("**/v1/completions", lambda route: route.fulfill(content_type="text/event-stream", body=stream))
    ask(page, hostile)
    page.wait_for_selector(ANSWERED)
    assert page.text_content(".asked") == page.text_content(".answer") == hostile
    assert page.locator("#turns img, #turns script").count() == 0


def test_the_key_is_sent_and_kept_for_this_tab_only(page: Any, context: Any, url: str) -> None:
    page.evaluate("document.getElementById('settings').open = true")
    page.fill("[name=key]", "my-key")
    with page.expect_request("**/v1/completions") as sent:
        ask(page, max_tokens=4)
    assert sent.value.headers["authorization"] == "Bearer my-key"
    page.wait_for_selector(ANSWERED)
    page.reload()
    assert page.input_value("[name=key]") == "my-key"
    other = context.new_page()
    other.goto(url)
    assert other.input_value("[name=key]") == ""
    assert page.evaluate("localStorage.length") == 0


def test_a_server_with_keys_is_asked_once_for_each_key(context: Any, url: str) -> None:
    page = context.new_page()
    asked: list[str] = []

    def answer(route: Any) -> None:
        key = route.request.headers.get("authorization", "")
        asked.append(key)
        if key == "Bearer good":
            route.continue_()
        else:
            route.fulfill(status=401, body='{"error": {"message": "wrong key"}}')

    page.route("**/v1/stats", answer)
    page.clock.install()
    page.goto(url)
    page.wait_for_selector("#board-state:has-text('needs the key')")
    page.clock.run_for(5000)  # of the page's time: five more readings would come
    assert asked == [""]
    page.evaluate("document.getElementById('settings').open = true")
    page.fill("[name=key]", "good")
    page.clock.run_for(2000)
    page.wait_for_selector("#board-state:has-text('ready')")


def test_every_setting_reaches_the_server(page: Any) -> None:
    page.evaluate("document.getElementById('settings').open = true")
    page.wait_for_selector("[name=drafter] option[value=ngram]", state="attached")
    page.select_option("[name=drafter]", "ngram")
    page.select_option("[name=rule]", "coupled")
    with page.expect_request("**/v1/completions") as sent:
        ask(page, max_tokens=5, temperature="0.5", top_p="0.9", seed="7", num_draft="3", stop="a\n b")
    body = sent.value.post_data_json
    assert body.pop("prompt") == PROMPT
    assert body["spec"] == {"drafter": "ngram", "num_draft": 3, "rule": "coupled"}
    wanted = {"max_tokens": 5, "temperature": 0.5, "top_p": 0.9, "seed": 7, "stop": ["a", " b"], "stream": True}
    assert wanted.items() <= body.items()


def test_a_phone_of_forty_columns_shows_everything(browser: Any, url: str) -> None:
    with browser.new_context(viewport={"width": 320, "height": 640}, has_touch=True) as context:
        page = context.new_page()
        page.goto(url)
        page.wait_for_selector("#model:has-text('reference')")
        mode(page, "both")
        ask(page, "x" * 300 + PROMPT)
        page.wait_for_selector(".verdict:has(b)")
        page.wait_for_selector("#speed")
        assert page.evaluate("document.documentElement.scrollWidth") <= 320
        for name in ("#send", "#stop", "#prompt", "#figures"):
            box = page.locator(name).bounding_box()
            assert 0 <= box["x"] <= box["x"] + box["width"] <= 320, name


def test_dark_and_light(browser: Any, url: str) -> None:
    def brightness(page: Any) -> float:
        colour = page.evaluate("getComputedStyle(document.body).backgroundColor")
        return sum(map(float, re.findall(r"[\d.]+", colour)[:3]))

    for scheme, is_dark in (("dark", True), ("light", False)):
        with browser.new_context(color_scheme=scheme) as context:
            page = context.new_page()
            page.goto(url)
            assert (brightness(page) < 200) == is_dark
            page.click("#theme")
            assert page.text_content("#theme") == "Theme: light"
            assert brightness(page) > 600
            page.click("#theme")
            assert brightness(page) < 200


AXE = FOLDER / "node_modules" / "axe-core" / "axe.min.js"


@pytest.mark.skipif(not AXE.is_file(), reason="no axe-core: run scripts/get_browser.sh")
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing(browser: Any, url: str, scheme: str) -> None:
    """Labels, roles, contrast: every rule of axe-core."""
    with browser.new_context(color_scheme=scheme, bypass_csp=True) as context:
        page = context.new_page()
        page.goto(url)
        page.wait_for_selector("#model:has-text('reference')")
        ask(page)
        page.wait_for_selector(ANSWERED)
        page.wait_for_selector("#speed")
        page.add_script_tag(path=str(AXE))
        found = page.evaluate("axe.run().then(r => r.violations.map(v => [v.id, v.nodes.map(n => n.html)]))")
        assert found == []


@pytest.mark.skipif(PICTURES is None, reason="pictures are taken on request: set FORETOKEN_PICTURES to a folder")
@pytest.mark.parametrize(
    ("name", "width", "height", "scheme"),
    [("page-desktop", 1280, 860, "light"), ("page-dark", 1280, 860, "dark"), ("page-phone", 360, 760, "light")],
)
def test_pictures(browser: Any, url: str, name: str, width: int, height: int, scheme: str) -> None:
    with browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme) as context:
        page = context.new_page()
        page.goto(url)
        page.wait_for_selector("#model:has-text('reference')")
        mode(page, "speculative" if name == "page-phone" else "both")
        page.click("#examples :text('a rename')")
        page.wait_for_selector("[name=drafter] option[value=mix]", state="attached")
        page.evaluate("document.getElementById('settings').open = true")
        page.select_option("[name=drafter]", "mix")
        ask(page, page.input_value("#prompt"), max_tokens=64, num_draft="4")
        page.evaluate("document.getElementById('settings').open = false")
        for _ in range(3):  # so that the curve of the board has a shape
            page.wait_for_selector(ANSWERED)
            page.wait_for_selector("#send:enabled")
            page.click("#clear")
            page.press("#prompt", "Control+Enter")
        page.wait_for_selector(ANSWERED)
        page.wait_for_selector("#figures :text('draft_model')")
        page.evaluate("window.scrollTo(0, 0)")
        picture = Path(PICTURES or "") / f"{name}.png"
        page.screenshot(path=str(picture))
        assert picture.stat().st_size > 1000

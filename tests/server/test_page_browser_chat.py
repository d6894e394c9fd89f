"""The page in a real browser, with a model that has a chat template: what stays of a conversation when an answer is
stopped, fails or is refused, and what the form does not send.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from foretoken import LLM, SpecConfig
from foretoken.backend.local import LocalBackend
from foretoken.engine.async_engine import AsyncEngine
from foretoken.server.api.app import create_app
from foretoken.server.api.config import ApiConfig
from foretoken.server.page.page import page_router, stats_router
from tests.server.serving import chromium, opened_browser, served

pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
pytestmark = pytest.mark.skipif(chromium() is None, reason="no Chromium: run scripts/get_browser.sh")

ENDED = ".turn:last-child .answer[aria-busy=false]"
STATS = "**/v1/stats"


@pytest.fixture(scope="module")
def url(chat_folder: Path) -> Iterator[str]:
    spec = SpecConfig("ngram", num_draft=4)
    with LLM(chat_folder, spec, dtype="float32", profile="off") as llm, AsyncEngine(llm) as engine:
        routers = (page_router(), stats_router)
        with served(create_app(LocalBackend(engine, "chatty"), ApiConfig(), routers=routers)) as address:
            yield address


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with opened_browser() as found:
        yield found


@pytest.fixture
def context(browser: Any) -> Iterator[Any]:
    with browser.new_context() as found:
        found.set_default_timeout(10_000)
        yield found


@pytest.fixture
def page(context: Any, url: str) -> Iterator[Any]:
    found, problems = context.new_page(), list[str]()
    found.on("pageerror", lambda error: problems.append(str(error)))
    found.goto(url)
    found.wait_for_selector("#prompt-label:has-text('Message')")
    found.evaluate("document.getElementById('settings').open = true")
    yield found
    assert problems == []


def ask(page: Any, message: str, **fields: object) -> None:
    for name, value in fields.items():
        page.fill(f"[name={name}]", str(value))
    page.fill("#prompt", message)
    page.press("#prompt", "Enter")


def messages_of(page: Any, message: str) -> list[dict[str, str]]:
    """What is sent with the next message."""
    with page.expect_request("**/v1/chat/completions") as sent:
        ask(page, message, max_tokens=4)
    page.wait_for_selector(ENDED)
    return list(sent.value.post_data_json["messages"])


def error_of(page: Any) -> str:
    page.wait_for_selector("#error:visible")
    return str(page.text_content("#error"))


def test_what_was_said_until_stop_stays_in_the_conversation(page: Any) -> None:
    """As in `foretoken chat`: the page still shows it, so that the next message may speak of it."""
    ask(page, "a story", max_tokens=1500, temperature=1)
    page.wait_for_selector(".answer .tok >> nth=5")
    page.click("#stop")
    page.wait_for_selector(".detail:has-text('ended: stopped')")
    said = page.text_content(".answer")
    first = [{"role": "user", "content": "a story"}, {"role": "assistant", "content": said}]
    assert messages_of(page, "go on") == [*first, {"role": "user", "content": "go on"}]


def test_a_conversation_that_was_cleared_in_mid_answer_does_not_come_back(page: Any) -> None:
    ask(page, "a story", max_tokens=1500, temperature=1)
    page.wait_for_selector(".answer .tok >> nth=5")
    page.click("#clear")
    page.wait_for_selector("#send:enabled")
    assert page.input_value("#prompt") == ""
    assert messages_of(page, "again") == [{"role": "user", "content": "again"}]


def test_a_message_that_is_refused_can_be_sent_again(page: Any) -> None:
    message = "a long message, written with care"
    ask(page, message, temperature=-1)
    assert "temperature" in error_of(page)
    assert page.input_value("#prompt") == message
    page.fill("[name=temperature]", "0")
    assert messages_of(page, message) == [{"role": "user", "content": message}]


def test_a_message_whose_answer_breaks_off_goes_back_unless_another_was_begun(page: Any) -> None:
    half = 'data: {"choices": [{"index": 0, "delta": {"content": "half"}}]}\n\n'
    replies: list[Any] = []
    page.route("**/v1/chat/completions", lambda route: replies.append(route))
    for begun, left in (("", "first"), ("second", "second")):
        ask(page, "first")
        while not replies:
            page.wait_for_timeout(10)
        page.fill("#prompt", begun)
        replies.pop().fulfill(content_type="text/event-stream", body=half)
        assert "before the answer was complete" in error_of(page)
        assert page.input_value("#prompt") == left
    page.unroute("**/v1/chat/completions")
    assert messages_of(page, "third") == [{"role": "user", "content": "third"}]


def test_a_full_conversation_names_the_way_out(page: Any) -> None:
    ask(page, "x " * 3000, max_tokens=4)
    assert "Clear begins" not in error_of(page)  # it is the message that is too long
    messages_of(page, "ab")
    ask(page, "x " * 3000)
    assert error_of(page).endswith(". Clear begins a new conversation.")


@pytest.mark.parametrize(
    ("name", "typed", "said"),
    [
        ("max_tokens", "1e", "max_tokens: this is no number"),
        ("temperature", "-", "temperature: this is no number"),
        ("num_draft", "four", "num_draft: enter a whole number, or auto"),
        ("seed", "9007199254740993", "seed: this page sends seeds up to 9007199254740991"),
    ],
)
def test_a_setting_that_cannot_be_sent_as_typed_is_not_left_out(page: Any, name: str, typed: str, said: str) -> None:
    sent: list[str] = []
    page.on("request", lambda request: sent.append(request.url) if request.method == "POST" else None)
    page.fill(f"[name={name}]", "")
    page.focus(f"[name={name}]")
    page.keyboard.type(typed)
    ask(page, "ab")
    assert error_of(page) == said
    assert page.get_attribute(f"[name={name}]", "aria-invalid") == "true"
    assert page.evaluate("document.activeElement.name") == name
    assert (sent, page.input_value("#prompt"), page.locator(".turn").count()) == ([], "ab", 0)
    page.fill(f"[name={name}]", "7")
    messages_of(page, "ab")


def test_a_setting_of_speculation_that_is_refused_is_marked(page: Any) -> None:
    ask(page, "ab", num_draft=99999)
    assert "num_draft" in error_of(page)
    assert page.get_attribute("[name=num_draft]", "aria-invalid") == "true"


def test_answers_of_one_token_are_not_compared(page: Any) -> None:
    """Their speed would be that of the prompt, which the second one finds in the cache."""
    page.check("input[name=mode][value=both]", force=True)
    ask(page, "ab", max_tokens=1)
    page.wait_for_selector(".verdict:has-text('.')")
    said = "The answers are too short to compare their speeds. The two texts are the same."
    assert page.text_content(".verdict") == said


def answer_with_key(route: Any) -> None:
    if route.request.headers.get("authorization") == "Bearer good":
        route.continue_()
    else:
        route.fulfill(status=401, body='{"error": {"message": "wrong key"}}')


def test_a_message_may_be_sent_as_soon_as_the_key_is_entered(context: Any, url: str) -> None:
    page = context.new_page()
    page.route("**/v1/**", answer_with_key)
    page.goto(url)
    page.wait_for_selector("#board-state:has-text('needs the key')")
    page.evaluate("document.getElementById('settings').open = true")
    page.fill("[name=max_tokens]", "4")
    page.fill("#prompt", "ab")
    page.fill("[name=key]", "good")  # the board reads once a second only
    page.press("#prompt", "Control+Enter")
    page.wait_for_selector(f"{ENDED} .tok", state="attached")
    assert page.text_content("#prompt-label") == "Message"


def test_a_server_that_no_longer_wants_a_key_is_read_again(context: Any, url: str) -> None:
    page = context.new_page()
    page.route(STATS, answer_with_key)
    page.goto(url)
    page.wait_for_selector("#board-state:has-text('needs the key')")
    page.unroute(STATS)
    page.fill("#prompt", "ab")
    page.click("#send")
    page.wait_for_selector(ENDED)
    page.wait_for_selector("#board-state:has-text('ready')")


def test_a_key_that_no_header_can_hold_is_named(page: Any) -> None:
    page.fill("[name=key]", "“good”")
    ask(page, "ab")
    assert error_of(page) == "No server takes this API key: keys are ASCII without spaces"
    assert page.evaluate("document.activeElement.name") == "key"


def test_a_server_that_was_started_anew_offers_what_it_has(page: Any) -> None:
    def describe(route: Any) -> None:
        answer = route.fetch()
        route.fulfill(response=answer, json=answer.json() | {"drafters": ["suffix"]})

    page.select_option("[name=format]", "completion")
    page.route(STATS, describe)
    page.wait_for_selector("[name=drafter] option:nth-child(2):last-child", state="attached")
    options = page.eval_on_selector_all("[name=drafter] option", "all => all.map(one => one.value)")
    assert options == ["", "suffix"]
    assert page.input_value("[name=format]") == "completion"  # the choice of whoever uses the page stays
    page.unroute(STATS)


def test_a_browser_that_keeps_nothing_has_a_page(context: Any, url: str) -> None:
    page = context.new_page()
    refuse = "get() { throw new DOMException('denied', 'SecurityError'); }"
    page.add_init_script(f"Object.defineProperty(window, 'sessionStorage', {{ {refuse} }});")
    page.goto(url)
    page.wait_for_selector("#prompt-label:has-text('Message')")
    page.evaluate("document.getElementById('settings').open = true")
    page.fill("[name=key]", "my-key")
    assert messages_of(page, "ab") == [{"role": "user", "content": "ab"}]

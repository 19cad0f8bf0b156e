"""The chat page in a browser: a question typed, an answer streamed, nothing fetched from elsewhere."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from tinyvllm_ref import LLM, SamplingParams
from tinyvllm_ref.server import Settings

from .serving import MODEL, served, wait_for

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@pytest.fixture(scope="module")
def browser():
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield found
        found.close()


def open_page(browser, server, **options):
    """The page, and what went wrong in it so far."""
    page = browser.new_page(viewport={"width": 900, "height": 700}, **options)
    problems: list[str] = []
    page.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("request", lambda r: None if r.url.startswith((server.url, "data:")) else problems.append(r.url))
    page.goto(server.url)
    wait_for(lambda: page.evaluate("document.getElementById('model').textContent.length > 0"))
    return page, problems


def keep(page, name: str) -> None:
    """A picture to look at, where TINYVLLM_SHOTS names a folder."""
    if "TINYVLLM_SHOTS" in os.environ:
        page.screenshot(path=Path(os.environ["TINYVLLM_SHOTS"]) / f"{name}.png")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_question_is_answered_as_it_comes(server, browser, reference, scheme):
    page, problems = open_page(browser, server, color_scheme=scheme)
    assert page.inner_text("#model") == MODEL
    page.evaluate(
        """() => { window.lengths = []; new MutationObserver(() => {
            const box = document.querySelector('.assistant');
            if (box) window.lengths.push(box.textContent.length);
        }).observe(document.getElementById('talk'), {childList: true, subtree: true, characterData: true}); }"""
    )
    page.fill("#temperature", "0")
    page.fill("#tokens", "60")
    page.fill("#text", "Tell me a story about a cat.")
    page.press("#text", "Enter")
    page.wait_for_selector(".note")
    messages = [{"role": "user", "content": "Tell me a story about a cat."}]
    (expected,) = reference.chat(messages, SamplingParams(max_tokens=60, temperature=0.0))
    assert page.text_content(".user") == messages[0]["content"]
    assert page.text_content(".assistant") == expected.outputs[0].text
    lengths = page.evaluate("window.lengths")
    assert len(set(lengths)) > 10, "it came piece by piece"
    assert "60 tokens" in page.inner_text(".note")
    keep(page, f"chat-{scheme}")

    messages += [
        {"role": "assistant", "content": expected.outputs[0].text},
        {"role": "user", "content": "And then?"},
    ]
    (second,) = reference.chat(messages, SamplingParams(max_tokens=60, temperature=0.0))
    page.fill("#text", "And then?")
    page.click("#send")
    page.wait_for_selector(".note >> nth=1")
    assert page.locator(".assistant").nth(1).text_content() == second.outputs[0].text, (
        "it knows what was said"
    )
    page.click("#fresh")
    assert page.locator(".message").count() == 0
    assert problems == []
    page.close()


def test_stop_aborts_the_request(server, browser):
    page, problems = open_page(browser, server)
    page.fill("#tokens", "900")
    page.evaluate(
        """() => {
            const real = window.fetch;
            window.fetch = (url, options) => real(url, options?.body
                ? {...options, body: JSON.stringify({...JSON.parse(options.body), ignore_eos: true})} : options);
        }"""
    )
    page.fill("#text", "Tell me a story.")
    page.press("#text", "Enter")
    wait_for(lambda: page.evaluate("document.querySelector('.assistant')?.textContent.length > 20"))
    assert server.engine.stats.running == 1
    page.click("#stop")
    page.wait_for_selector(".note")
    assert "stopped" in page.inner_text(".note")
    server.check_idle()
    assert problems == []
    page.close()


def test_what_a_model_writes_is_text_and_no_part_of_the_page(server, browser):
    page, _ = open_page(browser, server)
    evil = "<img src=x onerror=\"document.title='taken'\"><b>bold</b>"
    page.evaluate("(text) => show('assistant', text)", evil)
    assert page.text_content(".assistant") == evil
    assert page.locator(".assistant *").count() == 0
    page.evaluate("(text) => { document.getElementById('talk').innerHTML = text; }", evil)
    page.wait_for_timeout(100)
    assert page.title() == "tinyvllm", "and if it were, the policy would not let it run"
    page.close()


def test_errors_and_the_key(browser):
    settings = Settings(api_key="sk-right")
    with served(LLM(MODEL, num_blocks=64), settings) as server:
        page, _ = open_page(browser, server)
        assert "API key" in page.inner_text("#model")
        page.fill("#key", "sk-right")
        page.press("#key", "Tab")
        wait_for(lambda: page.evaluate(f"document.getElementById('model').textContent === '{MODEL}'"))
        page.fill("#tokens", "5000")
        page.fill("#text", "Tell me a story.")
        page.press("#text", "Enter")
        page.wait_for_selector(".wrong")
        assert "at most 1024" in page.inner_text(".wrong")
        keep(page, "error")
        page.close()


@pytest.mark.parametrize("width", [320, 900])
def test_nothing_lies_outside_the_window(server, browser, width):
    page, _ = open_page(browser, server)
    page.set_viewport_size({"width": width, "height": 600})
    page.evaluate("() => { for (let k = 0; k < 30; k++) show('user', 'word '.repeat(k) + 'x'.repeat(80)); }")
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert page.evaluate("document.getElementById('send').getBoundingClientRect().bottom <= innerHeight")
    keep(page, f"width-{width}")
    page.close()


def test_the_page_has_no_address_of_another_machine():
    from tinyvllm_ref.server.page import _html

    text, policy = _html()
    assert "//" not in text.replace("//  ", "").replace("  // as text", "")
    assert policy.startswith("default-src 'none'")
    assert "unsafe" not in policy

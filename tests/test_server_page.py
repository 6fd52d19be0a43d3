"""The server's page in a real browser, without a window."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator
from dataclasses import replace
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

pytest.importorskip("selenium", reason="a machine that only runs GPU tests may lack it")

from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import WebDriverWait

from cudnn_ops.server.app import create_app
from cudnn_ops.server.running import serve_in_thread
from tests.cases.server import Bytes, Tiny, make_tiny

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
FLAGS = """--headless --no-sandbox --disable-gpu --disable-quic --no-first-run
    --disable-background-networking --disable-component-update --disable-sync
    --disable-dev-shm-usage --window-size=1000,760"""

pytestmark = pytest.mark.skipif(
    not (CHROMIUM and DRIVER),
    reason="no chromium and chromedriver: apt-get install chromium-driver",
)


class Letters(Bytes):
    """Conversations of which only the last message counts, so that answers are easy to tell."""

    def encode_chat(self, messages) -> list[int]:
        super().encode_chat(messages)
        return self.encode(messages[-1]["content"])


class Plain(Letters):
    has_chat = False


@pytest.fixture(scope="module")
def browser(tmp_path_factory) -> Iterator[webdriver.Chrome]:
    options = webdriver.ChromeOptions()
    options.binary_location = str(CHROMIUM)
    for flag in [*FLAGS.split(), f"--user-data-dir={tmp_path_factory.mktemp('browser')}"]:
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    service = webdriver.ChromeService(executable_path=DRIVER)
    driver = webdriver.Chrome(options=options, service=service)
    driver.set_page_load_timeout(120)
    yield driver
    driver.quit()


@pytest.fixture
def tiny() -> Iterator[Tiny]:
    tiny = make_tiny(max_length=512)
    yield tiny
    tiny.check_pages()


def wait(browser: webdriver.Chrome, condition) -> None:
    WebDriverWait(browser, 60, poll_frequency=0.05).until(lambda _: condition())


def say(browser: webdriver.Chrome, text: str, options: dict[str, str] | None = None) -> None:
    wait(browser, lambda: browser.find_element(By.ID, "send").is_enabled())
    for name, value in ({"temperature": "0", "max_tokens": "20"} | (options or {})).items():
        script = "document.getElementById(arguments[0]).value = arguments[1]"
        browser.execute_script(script, name, value)
    browser.find_element(By.ID, "prompt").send_keys(text, Keys.ENTER)


def bubbles(browser: webdriver.Chrome) -> list[str]:
    return [each.text for each in browser.find_elements(By.CSS_SELECTOR, ".bubble")]


def notes(browser: webdriver.Chrome) -> list[str]:
    return [each.text for each in browser.find_elements(By.CSS_SELECTOR, ".note") if each.text]


def check_screenshot(browser: webdriver.Chrome, path: Path) -> None:
    """Something is drawn where its parts are, in several colours."""
    browser.save_screenshot(str(path))
    pixels = np.asarray(Image.open(BytesIO(path.read_bytes())).convert("RGB")).astype(int)
    assert pixels.shape[0] > 400
    assert pixels.shape[1] > 600
    ground = pixels[pixels.shape[0] // 2, 5]
    for each in browser.find_elements(By.CSS_SELECTOR, "#model, .bubble, .assistant .note, #send"):
        top, left = int(each.rect["y"]), int(each.rect["x"])
        part = pixels[top : top + int(each.rect["height"]), left : left + int(each.rect["width"])]
        assert part.std() > 2
        assert (part != ground).any(-1).mean() > 0.05
        assert len(np.unique(part.reshape(-1, 3), axis=0)) > 20  # letters with soft edges


def check_log(browser: webdriver.Chrome) -> None:
    """No errors of the script or of the page's policy."""
    log = browser.get_log("browser")
    assert [each for each in log if each["level"] in ("SEVERE", "WARNING")] == []


def test_a_conversation(browser, tiny, tmp_path):
    """Typed, streamed, shown; then stopped, continued and cleared."""
    with serve_in_thread(create_app(tiny.serving, Letters(), "alphabet")) as url:
        browser.get(url)
        wait(browser, lambda: browser.find_element(By.ID, "model").text == "alphabet")
        assert browser.title == "alphabet"
        assert browser.find_element(By.ID, "about").text == "512 tokens of context"
        assert browser.find_element(By.ID, "empty").text == "Ask the model something."

        say(browser, "What follows these letters? abc")
        wait(browser, lambda: notes(browser))
        assert bubbles(browser) == ["What follows these letters? abc", "defghijklmnopqrstuvw"]
        assert notes(browser)[0].startswith("20 tokens, ")
        assert notes(browser)[0].endswith(" a second, most tokens reached")
        check_screenshot(browser, tmp_path / "page.png")

        # Stop ends it in the server too.
        tiny.model.gate.clear()
        say(browser, "x", {"max_tokens": "500"})
        wait(browser, lambda: tiny.engine.running == 1)
        browser.find_element(By.ID, "send").click()
        wait(browser, lambda: len(notes(browser)) == 2)
        tiny.model.gate.set()
        wait(browser, lambda: len(notes(browser)) == 2)
        assert bubbles(browser)[2] == "x"
        assert notes(browser)[1] == "stopped"
        wait(browser, lambda: tiny.serving.unfinished == 0)
        assert tiny.engine.stats.aborted == 1

        say(browser, "Tell me more, xyz")
        wait(browser, lambda: len(notes(browser)) == 3)
        assert bubbles(browser)[5] == "abcdefghijklmnopqrst"
        browser.find_element(By.ID, "clear").click()
        assert bubbles(browser) == []
        check_log(browser)


def test_text_comes_piece_by_piece(browser, tiny):
    """What has come is there while the model waits before the rest."""
    waits = threading.Event()

    def up_to_f(output: list[int]) -> None:
        if len(output) == 3:
            waits.wait(60)

    submit = tiny.serving.submit

    async def slowly(prompt, params):
        return await submit(prompt, replace(params, allowed_tokens=up_to_f))

    tiny.serving.submit = slowly
    with serve_in_thread(create_app(tiny.serving, Letters(), "alphabet")) as url:
        browser.get(url)
        say(browser, "abc")
        wait(browser, lambda: bubbles(browser)[1:] == ["def"])
        assert browser.find_element(By.ID, "send").text == "Stop"
        assert notes(browser) == []
        waits.set()
        wait(browser, lambda: bubbles(browser)[1] == "defghijklmnopqrstuvw")
        wait(browser, lambda: browser.find_element(By.ID, "send").text == "Send")


def test_a_model_that_continues_text(browser, tiny):
    with serve_in_thread(create_app(tiny.serving, Plain(), "plain")) as url:
        browser.get(url)
        wait(browser, lambda: browser.find_element(By.ID, "empty").text.startswith("This model"))
        say(browser, "abc")
        wait(browser, lambda: notes(browser))
        assert bubbles(browser) == ["abc", "defghijklmnopqrstuvw"]
        check_log(browser)


def test_answers_are_text(browser, tiny):
    """Whatever a model writes, the page shows and does not run."""
    writes = "<img src=x onerror=document.title='run'>"

    class Ordered(Letters):
        def decode(self, tokens) -> str:
            return writes if tokens else ""

    with serve_in_thread(create_app(tiny.serving, Ordered(), "writer")) as url:
        tiny.serving._decode = Ordered().decode
        browser.get(url)
        say(browser, "#", {"max_tokens": "1"})
        wait(browser, lambda: notes(browser))
        assert bubbles(browser)[1] == writes
        assert browser.title == "writer"


def test_errors_and_keys(browser, tiny):
    with serve_in_thread(create_app(tiny.serving, Letters(), "locked", api_key="sesame")) as url:
        browser.get(url)
        wait(browser, lambda: browser.find_element(By.ID, "model").text == "Not connected")
        assert browser.find_element(By.ID, "empty").text == "a valid API key is needed"
        assert not browser.find_element(By.ID, "send").is_enabled()
        browser.find_element(By.CSS_SELECTOR, "summary").click()
        browser.find_element(By.ID, "key").send_keys("sesame", Keys.TAB)
        wait(browser, lambda: browser.find_element(By.ID, "model").text == "locked")
        say(browser, "a" * 500)
        wait(browser, lambda: notes(browser))
        assert bubbles(browser)[1].startswith("this model's context has room for 512 tokens")
        assert notes(browser) == ["failed"]
        say(browser, "abc")
        wait(browser, lambda: len(notes(browser)) == 2)
        assert bubbles(browser)[3] == "defghijklmnopqrstuvw"

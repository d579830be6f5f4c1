"""The app end to end: a server of its own, and people in headless Chromium."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from conftest import TEXT

playwright = pytest.importorskip("playwright.sync_api")

CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium"),
]

APP = Path(__file__).parents[2] / "app"
QUESTION = "When was the harbour of Lindholm built?"
PATIENCE = 60_000  # milliseconds: a busy machine is no failure
VIEWS = ("", "library", "quality", "models")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Address of the app over tiny models and an empty home."""
    home = tmp_path_factory.mktemp("home")
    settings = {
        "HOME": home, "REFERENCE": "ref", "TARGET": "tgt", "PASSAGE_TOKENS": 48, "MAX_TOKENS": 6,
        "K": 2, "DTYPE": "float32", "CODEC": "fp32",
    }  # fmt: skip
    with closing(socket.socket()) as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "streamlit", "run", str(Path(__file__).parent / "tiny_app.py")]
    command += ["--server.headless=true", f"--server.port={port}"]
    environment = os.environ | {f"CAG_{name}": str(value) for name, value in settings.items()}
    with (home / "server.log").open("w") as log:  # in APP lies the configuration that users get
        process = subprocess.Popen(command, cwd=APP, env=environment, stdout=log, stderr=log)
    try:
        _wait_for(f"http://127.0.0.1:{port}/_stcore/health", process, home / "server.log")
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(20)


def _wait_for(address: str, process: subprocess.Popen[bytes], log: Path) -> None:
    for _ in range(600):
        assert process.poll() is None, log.read_text()
        try:
            with urllib.request.urlopen(address, timeout=1):
                return
        except OSError:
            time.sleep(0.2)
    raise AssertionError(f"the server does not answer: {log.read_text()}")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    arguments = ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=arguments)
        yield browser
        browser.close()


class Person:
    """Somebody with a browser window of their own.

    Attributes
    ----------
    page
        Playwright's page.
    outside
        What was asked of any machine but this one.
    """

    def __init__(self, browser: Any, server: str, width: int = 1280, scheme: str = "light") -> None:
        self.context = browser.new_context(
            viewport={"width": width, "height": 900}, color_scheme=scheme
        )
        self.context.set_default_timeout(PATIENCE)
        self.page = self.context.new_page()
        self.server, self.outside, self.complaints = server, list[str](), list[str]()
        self.page.on("request", self._note_request)
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))

    def _note_request(self, request: Any) -> None:
        parts = urlsplit(request.url)
        if parts.hostname not in (None, "127.0.0.1", "localhost"):
            self.outside.append(request.url)

    def open(self, place: str = "") -> Person:
        self.page.goto(f"{self.server}/{place}")
        self.page.locator("h1").wait_for()
        return self.rest()

    def rest(self) -> Person:
        """Wait until the page is done."""
        self.page.locator('[data-test-script-state="notRunning"]').wait_for()
        return self

    def ask(self, question: str) -> None:
        """Type a question and press Enter; does not wait."""
        box = self.page.get_by_label("Question", exact=True)
        box.fill(question)
        box.press("Enter")

    def answered(self) -> list[str]:
        """Answers, once they are there."""
        self.page.get_by_text("What the answers cost").wait_for()
        self.rest()
        return self.page.locator('[data-testid="stText"]').all_inner_texts()

    def overflow(self) -> int:
        """Pixels by which the page is wider than the window."""
        wide = """() => Math.max(...['html', '[data-testid="stMain"]'].map(
            s => document.querySelector(s)).map(e => e.scrollWidth - e.clientWidth))"""
        return int(self.page.evaluate(wide))


@pytest.fixture(scope="module")
def filled(browser: Any, server: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The server after somebody has come to an empty library and uploaded a document."""
    document = tmp_path_factory.mktemp("docs") / "harbour.md"
    document.write_text(f"# Harbour\n\n{TEXT}\n\n# Boats\n\nBoats are blue.\n")
    person = Person(browser, server).open()
    person.page.get_by_role("link", name="Add documents").click()
    person.page.locator("input[type=file]").set_input_files(document)
    person.page.get_by_text("harbour.md").first.wait_for()
    person.page.get_by_role("button", name="Read them").click()
    person.page.get_by_text("1 added").wait_for()
    assert not person.outside and not person.complaints
    person.context.close()
    return server


def test_a_question_is_asked_with_the_keyboard(browser: Any, filled: str) -> None:
    person = Person(browser, filled).open()
    person.ask(QUESTION)
    assert person.answered()
    query = parse_qs(urlsplit(person.page.url).query)
    assert query["q"] == [QUESTION] and query["path"] == ["translated", "direct"]
    assert "built in 1874" in person.page.locator("mark").first.inner_text()
    assert not person.outside and not person.complaints
    person.context.close()


def test_a_link_reproduces_the_answers(browser: Any, filled: str) -> None:
    one = Person(browser, filled).open()
    one.ask(QUESTION)
    answers = one.answered()
    other = Person(browser, filled).open(one.page.url.removeprefix(f"{filled}/"))
    assert other.answered() == answers
    field = other.page.get_by_label("Question", exact=True)
    # answers may come before the page fills it
    playwright.expect(field).to_have_value(QUESTION, timeout=PATIENCE)
    one.page.reload()
    assert one.answered() == answers
    for person in (one, other):
        person.context.close()


def test_two_people_ask_at_once(browser: Any, filled: str) -> None:
    people = [Person(browser, filled).open() for _ in range(2)]
    questions = (QUESTION, "What colour are boats?")
    for person, question in zip(people, questions, strict=True):
        person.ask(question)
    for person, question in zip(people, questions, strict=True):
        assert person.answered()
        assert parse_qs(urlsplit(person.page.url).query)["q"] == [question]
        assert not person.page.locator('[data-testid="stException"]').count()
        person.context.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_every_view_fits_its_window(browser: Any, filled: str, width: int, scheme: str) -> None:
    person = Person(browser, filled, width, scheme)
    for view in VIEWS:
        person.open(view)
        if not view:
            person.ask(QUESTION)
            person.answered()
        assert person.overflow() <= 0, view
        assert not person.page.locator('[data-testid="stException"]').count(), view
    assert not person.outside and not person.complaints
    person.context.close()


def test_the_menu_leads_to_every_view(browser: Any, filled: str) -> None:
    person = Person(browser, filled).open()
    for title in ("Library", "Quality", "Models", "Compare"):
        person.page.get_by_role("link", name=title).first.click()
        person.page.get_by_role("heading", name=title, exact=True).first.wait_for()
    person.context.close()

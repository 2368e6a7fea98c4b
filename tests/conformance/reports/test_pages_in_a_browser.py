"""The page of a report as somebody uses it: tiles lead to checks, scripts are copied, light and dark can be read."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gymnasium as gym
import pytest

from sandboxgym import SnapshotSpec
from sandboxgym.conformance import Subject, run
from sandboxgym.conformance.reports import html

CHECKS = ["restore.many", "restore.other_env", "restore.whole_episode", "fork.isolation", "api.protocol"]


class Shared(gym.Env):
    """Restores the very list that a snapshot holds: its snapshots change with it."""

    observation_space, action_space = gym.spaces.Discrete(1000), gym.spaces.Discrete(3)
    snapshot_spec = SnapshotSpec(kind="memory", cross_process=False, cross_host=False)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.things = [int(self.np_random.integers(10))]
        return sum(self.things), {}

    def step(self, action):
        self.things.append(int(action) + 1)
        return sum(self.things), 0.0, len(self.things) > 12, False, {}

    def snapshot(self):
        return list(self.things)

    def restore(self, snap, *, seed=None):
        self.things = snap
        super().reset(seed=0 if seed is None else seed)
        return sum(self.things), {}

    def fork(self, k, *, seed=None):
        children = [Shared() for _ in range(k)]
        for child in children:
            child.restore(self.snapshot(), seed=seed)
        return children


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page") / "report.html"
    html.write(run(Subject(Shared), only=CHECKS), path)
    return path


@pytest.fixture
def opened(browser: Any, page: Path) -> Iterator[Callable[..., Any]]:
    """Opens the page offline; any error or message in it fails the test."""
    wrong: list[str] = []
    contexts = []

    def open_(scheme: str = "light", width: int = 1200) -> Any:
        context = browser.new_context(
            viewport={"width": width, "height": 800},
            color_scheme=scheme,
            offline=True,
            permissions=["clipboard-read", "clipboard-write"],
        )
        contexts.append(context)
        tab = context.new_page()
        tab.on("pageerror", lambda error: wrong.append(str(error)))
        tab.on("console", lambda message: wrong.append(message.text))
        tab.goto(page.as_uri())
        return tab

    yield open_
    for context in contexts:
        context.close()
    assert wrong == []


def test_a_tile_opens_the_check_that_it_names(opened: Callable[..., Any]) -> None:
    tab = opened()
    tiles = tab.locator("a.tile")
    assert tiles.count() == len(CHECKS)
    for number in range(tiles.count()):
        place = tiles.nth(number).get_attribute("href").removeprefix("#")
        tiles.nth(number).click()
        entry = tab.locator(f"[id='{place}']")
        assert entry.count() == 1 and entry.evaluate("node => node.open") and entry.is_visible()
        assert tab.url.endswith(f"#{place}")
    dangling = """() => [...document.querySelectorAll('a[href^="#"]')]
        .map(link => link.hash.slice(1)).filter(id => !document.getElementById(id))"""
    assert tab.evaluate(dangling) == []


def test_a_counterexample_is_copied_to_the_letter_and_shows_the_fault(
    opened: Callable[..., Any], tmp_path: Path
) -> None:
    tab = opened()
    button = tab.locator("button", has_text="Copy").first
    shown = button.evaluate("node => node.nextElementSibling.textContent")
    button.click()
    tab.locator("button", has_text="Copied").first.wait_for(timeout=5000)
    copied = tab.evaluate("() => navigator.clipboard.readText()")
    assert copied == shown and "restore" in copied
    here = "import sys; sys.path.insert(0, sys.argv[1])\nfrom test_pages_in_a_browser import Shared\n"
    script = re.sub(r"def make_env\(\):\n    \.\.\.", "make_env = Shared", copied)
    (tmp_path / "script.py").write_text(here + script)
    done = subprocess.run(
        [sys.executable, str(tmp_path / "script.py"), str(Path(__file__).parent)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    expected, found = (line.split(maxsplit=1)[1] for line in done.stdout.splitlines()[-2:])
    assert expected != found


def test_where_there_is_no_clipboard_the_script_is_selected(opened: Callable[..., Any]) -> None:
    tab = opened()
    tab.evaluate("() => Object.defineProperty(navigator, 'clipboard', { value: undefined })")
    button = tab.locator("button", has_text="Copy").first
    button.click()
    script = tab.locator("button", has_text="Selected").first.evaluate("node => node.nextElementSibling.textContent")
    assert tab.evaluate("() => getSelection().toString()").strip() == script.strip()


CONTRAST = """() => {
    const light = text => {
        const [r, g, b, a] = text.match(/[\\d.]+/g).map(Number);
        if (a === 0) return null;
        const part = v => (v /= 255) <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
        return 0.2126 * part(r) + 0.7152 * part(g) + 0.0722 * part(b);
    };
    const ground = node => {
        for (; node; node = node.parentElement) {
            const found = getComputedStyle(node).backgroundColor;
            if (found.startsWith("rgb") && light(found) !== null) return light(found);
        }
        return 1;
    };
    document.querySelectorAll("details").forEach(node => node.open = true);
    return [...document.querySelectorAll("body *")]
        .filter(node => [...node.childNodes].some(child => child.nodeType === 3 && child.data.trim()))
        .filter(node => !["STYLE", "SCRIPT", "TITLE"].includes(node.tagName))
        .map(node => {
            const [a, b] = [light(getComputedStyle(node).color), ground(node)].sort((x, y) => y - x);
            return [node.tagName + "." + node.className, (a + 0.05) / (b + 0.05)];
        });
}"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_text_can_be_read(opened: Callable[..., Any], scheme: str) -> None:
    """A contrast of 4.5 to 1 at least, as WCAG's level AA asks of text."""
    tab = opened(scheme)
    measured = tab.evaluate(CONTRAST)
    assert len(measured) > 50
    assert [(name, round(value, 2)) for name, value in measured if value < 4.5] == []
    ground = tab.evaluate("() => getComputedStyle(document.body).backgroundColor")
    assert (ground == "rgb(255, 255, 255)") == (scheme == "light")


@pytest.mark.parametrize("width", [360, 1200])
def test_the_page_is_no_wider_than_the_window(opened: Callable[..., Any], width: int) -> None:
    tab = opened(width=width)
    tab.evaluate("() => document.querySelectorAll('details').forEach(node => node.open = true)")
    assert tab.evaluate("() => document.documentElement.scrollWidth") <= width

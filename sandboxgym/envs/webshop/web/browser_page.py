"""`Tab`: a visit to the shop's website in a real browser, which can be looked at, acted in, and restored.

An address does not determine everything in a tab: typed text, caret, scroll, storage. `PageState` is that part, read
from the page itself after every action, and written back by `Tab.show`.
"""

from __future__ import annotations

import contextlib
import json
import re
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from sandboxgym import serialization as durable
from sandboxgym.brief import brief
from sandboxgym.envs.webshop.shop import Shop
from sandboxgym.envs.webshop.shop_state import PageType, ShopState
from sandboxgym.envs.webshop.site.addresses import path_of
from sandboxgym.envs.webshop.site.server import Server, Site
from sandboxgym.envs.webshop.text_pages import SEPARATOR
from sandboxgym.envs.webshop.web import chromium
from sandboxgym.envs.webshop.web.browser_actions import Gesture
from sandboxgym.envs.webshop.web.chromium import BrowserError
from sandboxgym.envs.webshop.web.leases import Leases, SharedLease
from sandboxgym.errors import SnapshotCorrupt

if TYPE_CHECKING:
    from playwright.async_api import BrowserContext, Page

BrowserMode = Literal["text", "html", "axtree", "screenshot"]
_MOST_TABS = 2_048
"""Limit of connections of all tabs together: they share one address, and none may be refused."""
VISITOR = "visitor"
"""Replacement in observations of the session's name, which differs in every tab."""


@dataclass(frozen=True, slots=True)
class PageState:
    """State of a page that its address does not determine."""

    typed: str = ""
    """Text typed into the search field."""
    caret: tuple[int, int] | None = None
    """Selection in the search field, in UTF-16 units; None if it has no focus."""
    slid: int = 0
    """Scroll position of the search field itself."""
    scroll: tuple[int, int] = (0, 0)
    """Scroll position of the page, to the right and down."""
    storage: str = ""
    """Cookies and local storage as JSON, without the names of server and session; "" if there are none."""

    @classmethod
    def at_rest(cls, page: PageType) -> PageState:
        """State of a page that was just opened."""
        return cls(caret=(0, 0) if page == "search" else None)

    def as_list(self) -> list[Any]:
        """Convert to plain data."""
        return [
            self.typed,
            None if self.caret is None else list(self.caret),
            self.slid,
            list(self.scroll),
            self.storage,
        ]

    @classmethod
    def from_list(cls, values: Any) -> PageState:
        """Convert the result of `as_list` back.

        Raises:
            SnapshotCorrupt: the values are not a page's state.
        """
        match values:
            case [str(typed), None | [int(), int()] as caret, int(slid), [int(right), int(down)], str(storage)] if all(
                -_FAR < place < _FAR for place in (*(caret or ()), slid, right, down)
            ) and _is_storage(storage):
                return cls(typed, None if caret is None else (caret[0], caret[1]), slid, (right, down), storage)
        raise SnapshotCorrupt(f"expected the state of a page, found {brief(values)}")

    def digestible(self) -> bytes:
        """Value for digests, equal if and only if the states are."""
        return durable.pack(self.as_list())


_FAR = 2**31
_COOKIE = {"name": str, "value": str, "domain": str, "path": str}
_MORE_OF_A_COOKIE = {"expires": (int, float), "httpOnly": bool, "secure": bool, "sameSite": str, "partitionKey": str}
_NO_TEXT_OF_A_COOKIE = re.compile(r"[\x00-\x1f\x7f;]")


def _is_storage(text: str) -> bool:
    """Tell whether a value is a page's storage, in the form of `PageState.storage` that Playwright takes."""
    if not text:
        return True
    try:
        stored = json.loads(text)
    except (ValueError, RecursionError):
        return False
    match stored:
        case [list(cookies), list(items)]:
            return all(map(_is_cookie, cookies)) and all(map(_is_item, items))
    return False


def _is_cookie(cookie: Any) -> bool:
    if not isinstance(cookie, dict) or not _COOKIE.keys() <= cookie.keys() <= _COOKIE.keys() | _MORE_OF_A_COOKIE.keys():
        return False
    kinds: dict[str, Any] = {**_COOKIE, **_MORE_OF_A_COOKIE}
    if not all(isinstance(value, kinds[name]) for name, value in cookie.items()):
        return False
    expires = cookie.get("expires", -1)
    return (
        not any(_NO_TEXT_OF_A_COOKIE.search(cookie[name]) or len(cookie[name]) > 4096 for name in _COOKIE)
        and cookie["path"].startswith("/")
        and cookie["name"] + cookie["value"] != ""
        and (expires == -1 or 0 < expires < 2**40)
        and cookie.get("sameSite", "Lax") in ("Strict", "Lax", "None")
    )


def _is_item(item: Any) -> bool:
    return (
        isinstance(item, dict) and item.keys() == {"name", "value"} and all(isinstance(v, str) for v in item.values())
    )


@dataclass(frozen=True, slots=True)
class Look:
    """Result of looking at a tab."""

    session: ShopState
    page: PageState
    observation: str | bytes
    """Text of the page, or a screenshot as PNG."""


class _Front:
    """The website of a shop, on a port of this machine."""

    def __init__(self, shop: Shop) -> None:
        self.site = Site(shop)
        self._server = Server(self.site, connections=_MOST_TABS, connections_per_visitor=_MOST_TABS)
        self.url = self._server.url
        self.address = f"127.0.0.1:{self._server.port}"
        self.alive = True

    def close(self) -> None:
        self.alive = False
        self._server.close()


_fronts: Leases[Shop, _Front] = Leases(_Front)


class Tab:
    """A browser context of its own with one page, and a session of its own on the website. Opened by the first `show`.

    Args:
        shop: the shop whose website is visited.
        mode: form of `Look.observation`.
        viewport: width and height in pixels.
        executable: see `chromium.chosen_executable`.
    """

    def __init__(self, shop: Shop, mode: BrowserMode, viewport: tuple[int, int], executable: str) -> None:
        self._shop, self._mode, self._viewport, self._executable = shop, mode, viewport, executable
        self._front: SharedLease[_Front] | None = None
        self._chromium: SharedLease[chromium.Chromium] | None = None
        self._context: BrowserContext | None = None
        self._page: Page | None = None
        self._storage = ""
        self._sid = ""

    @property
    def working(self) -> bool:
        """Tell whether the tab is open, in this process."""
        leases = (self._front, self._chromium)
        return self._page is not None and all(lease is not None and lease.valid for lease in leases)

    # Public operations.

    def show(self, session: ShopState, page: PageState) -> None:
        """Restore a session and a page.

        Raises:
            BrowserError: the browser failed.
            DependencyNotInstalled: Playwright or a browser is missing.
        """
        if not self.working:
            self._open(session)
        self._site.put(self._sid, session)
        self._call(self._show(session, page))

    def look(self) -> Look:
        """Look at the page."""
        page, observation = self._call(self._look())
        return Look(self._site.session(self._sid), page, observation)

    def do(self, gesture: Gesture) -> bool:
        """Perform an action; returns whether it was possible: an element to click, a focused field to type into."""
        done: bool = self._call(self._do(gesture))
        return done

    def screenshot(self) -> bytes:
        """Screenshot of the viewport, as PNG."""
        picture: bytes = self._call(self._screenshot())
        return picture

    def run(self, script: str) -> Any:
        """Run a script in the page; returns its result."""
        assert self._page is not None
        return self._call(self._page.evaluate(script))

    def close(self) -> None:
        """Leave the shop. Idempotent."""
        context, self._context, self._page = self._context, None, None
        if self._chromium is not None:
            if context is not None and self._chromium.valid:
                with contextlib.suppress(BrowserError):
                    self._chromium.value.call(context.close())
            self._chromium.release()
        if self._front is not None:
            self._front.value.site.drop(self._sid)
            self._front.release()
        self._chromium = self._front = None

    def close_soon(self) -> None:
        """Close later, for callers that must not wait, such as the garbage collector in any thread."""
        with contextlib.suppress(RuntimeError):  # the interpreter is ending, and the browser with it
            threading.Thread(target=self.close, daemon=True, name="sandboxgym-tab").start()

    # Implementation.

    @property
    def _site(self) -> Site:
        assert self._front is not None
        return self._front.value.site

    def _call(self, coroutine: Any) -> Any:
        assert self._chromium is not None
        return self._chromium.value.call(coroutine)

    def _open(self, session: ShopState) -> None:
        self.close()
        try:
            self._front = _fronts.take(self._shop)
            self._chromium = chromium.leases.take(self._executable)
            self._sid = self._site.open(session)
            self._call(self._renew(""))
        except BaseException:
            self.close()
            raise

    async def _renew(self, storage: str) -> None:
        """Make a new context: only a new one can have other cookies and storage in every version of Playwright."""
        if self._context is not None:
            await self._context.close()
        self._context = self._page = None
        assert self._front is not None and self._chromium is not None
        front = self._front.value
        kept = None
        if storage:
            cookies, items = json.loads(storage)
            cookies = [{**cookie, "path": cookie["path"].replace(VISITOR, self._sid)} for cookie in cookies]
            kept = {"cookies": cookies, "origins": [{"origin": front.url, "localStorage": items}]}
        self._context = await self._chromium.value.open(front.address, self._viewport, kept)
        self._page = await self._context.new_page()
        self._storage = storage

    async def _show(self, session: ShopState, state: PageState) -> None:
        if state.storage != self._storage or self._page is None:
            await self._renew(state.storage)
        assert self._page is not None and self._front is not None
        await self._page.goto(self._front.value.url + path_of(session.place, self._sid))
        caret = None if state.caret is None else list(state.caret)
        await self._page.evaluate(_PUT, [state.typed, caret, state.slid, list(state.scroll)])

    async def _look(self) -> tuple[PageState, str | bytes]:
        page = self._page
        assert page is not None
        found = await page.evaluate(_READ)
        caret = found["caret"]
        self._storage = await self._stored() if found["stored"] else ""
        state = PageState(
            typed=found["typed"],
            caret=None if caret is None else (caret[0], caret[1]),
            slid=found["slid"],
            scroll=(found["scroll"][0], found["scroll"][1]),
            storage=self._storage,
        )
        match self._mode:
            case "text":
                pieces = (piece.strip() for piece in found["pieces"])
                return state, SEPARATOR.join(filter(None, pieces))
            case "html":
                return state, (await page.content()).replace(self._sid, VISITOR)
            case "axtree":
                return state, (await page.locator("body").aria_snapshot()).replace(self._sid, VISITOR)
            case "screenshot":
                return state, await self._screenshot()

    async def _stored(self) -> str:
        assert self._context is not None and self._front is not None
        stored: Any = await self._context.storage_state()
        here = self._front.value.url  # another port tomorrow
        items = [item for origin in stored["origins"] if origin["origin"] == here for item in origin["localStorage"]]
        cookies = [{**cookie, "path": cookie["path"].replace(self._sid, VISITOR)} for cookie in stored["cookies"]]
        return json.dumps([cookies, items], sort_keys=True)

    async def _screenshot(self) -> bytes:
        assert self._page is not None
        await self._page.mouse.move(0, 0)  # because an element under the pointer looks different
        return await self._page.screenshot(type="png", animations="disabled", caret="hide")

    async def _do(self, gesture: Gesture) -> bool:
        page = self._page
        assert page is not None
        match gesture.verb:
            case "search":
                if not await page.evaluate(_SELECT_FIELD):
                    return False
                await page.keyboard.insert_text(gesture.text)
                return await self._submit()
            case "click":
                at = await page.evaluate(_POINT_OF, gesture.text)
                return at is not None and await self._click(at[0], at[1])
            case "mouse_click":
                width, height = self._viewport
                if not (0 <= gesture.x < width and 0 <= gesture.y < height):
                    return False
                return await self._click(gesture.x, gesture.y)
            case "scroll":
                return bool(await page.evaluate(_SCROLL, [gesture.x, gesture.y]))
            case "type" | "press" if not await page.evaluate(_HAS_FOCUS):
                return False
            case "type":
                await page.keyboard.insert_text(gesture.text)
            case "press" if gesture.text == "Enter":
                return await self._submit()
            case "press":
                await page.keyboard.press(gesture.text)
        return True

    async def _submit(self) -> bool:
        page = self._page
        assert page is not None
        if not await page.evaluate(_CAN_SEND):
            return False
        async with page.expect_navigation():
            await page.keyboard.press("Enter")
        return await self._arrive()

    async def _click(self, x: float, y: float) -> bool:
        page = self._page
        assert page is not None
        what = await page.evaluate(_WHAT_IS_AT, [x, y])
        if what == "nothing":
            return False
        if what == "field":
            await page.mouse.click(x, y)
            return True
        async with page.expect_navigation():
            await page.mouse.click(x, y)
        return await self._arrive()

    async def _arrive(self) -> bool:
        """Focus the search field at once, as the page does by itself; returns whether it is a page of the shop."""
        assert self._page is not None
        return bool(await self._page.evaluate(_ARRIVE))


_FIELD = "const field = document.getElementById('search_input');"
_SETTLE = "await new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)));"
_READ = f"""async () => {{
  {_FIELD}
  if (field && field.value) {{ {_SETTLE} }}  // a long text is scrolled to the caret in a frame of its own
  return {{
    pieces: [...document.querySelectorAll('[data-t]')].map(element => element.textContent),
    typed: field ? field.value : '',
    caret: field && document.activeElement === field ? [field.selectionStart, field.selectionEnd] : null,
    slid: field ? Math.round(field.scrollLeft) : 0,
    scroll: [Math.round(scrollX), Math.round(scrollY)],
    stored: document.cookie !== '' || localStorage.length > 0,
  }};
}}"""
_PUT = f"""async ([typed, caret, slid, scroll]) => {{
  {_FIELD}
  if (field) {{
    field.value = typed;
    if (caret) {{ field.focus({{preventScroll: true}}); field.setSelectionRange(...caret); }}
    else {{ field.focus(); field.blur(); }}  // else the page's own autofocus may come later
    if (typed) {{ {_SETTLE} field.scrollLeft = slid; }}
  }}
  window.scrollTo({{left: scroll[0], top: scroll[1], behavior: 'instant'}});
}}"""
_ARRIVE = f"""() => {{
  {_FIELD}
  if (field) field.focus();
  return !document.body.classList.contains('problem');
}}"""
_SELECT_FIELD = f"() => {{ {_FIELD} if (field) {{ field.focus(); field.select(); }} return field !== null; }}"
_HAS_FOCUS = f"() => {{ {_FIELD} return field !== null && document.activeElement === field; }}"
_CAN_SEND = f"() => {{ {_FIELD} return field !== null && field.form.checkValidity(); }}"
_POINT_OF = """name => {
  const element = [...document.querySelectorAll('[data-name]')].filter(each => each.dataset.name === name).pop();
  if (!element) return null;
  let box = element.getBoundingClientRect();
  if (box.top < 0 || box.left < 0 || box.bottom > innerHeight || box.right > innerWidth) {
    element.scrollIntoView({block: 'center', inline: 'center', behavior: 'instant'});
    box = element.getBoundingClientRect();
  }
  return [box.x + box.width / 2, box.y + box.height / 2];
}"""
_WHAT_IS_AT = """([x, y]) => {
  const element = document.elementFromPoint(x, y);
  if (!element) return 'nothing';
  const button = element.closest('button');
  if (element.closest('a[href]') || (button && button.form.checkValidity())) return 'way';
  return element.closest('input') ? 'field' : 'nothing';
}"""
_SCROLL = """([dx, dy]) => {
  const before = [scrollX, scrollY];
  window.scrollBy({left: dx, top: dy, behavior: 'instant'});
  return scrollX !== before[0] || scrollY !== before[1];
}"""

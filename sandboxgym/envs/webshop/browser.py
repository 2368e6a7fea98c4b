"""`WebShopBrowserEnv`: WebShop through its website in a real browser."""

from __future__ import annotations

import io
import os
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Any, ClassVar, Self, get_args

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from gymnasium.error import DependencyNotInstalled
from numpy.typing import NDArray

from sandboxgym import serialization as durable
from sandboxgym.core import SnapshotSpec, Transition
from sandboxgym.envs.webshop.card import BROWSER_CARD
from sandboxgym.envs.webshop.env import HARMLESS, WebShopEnv
from sandboxgym.envs.webshop.goals import Kind, Split
from sandboxgym.envs.webshop.shop import Tagger
from sandboxgym.envs.webshop.shop_state import ShopState
from sandboxgym.envs.webshop.web import browser_actions
from sandboxgym.envs.webshop.web.browser_page import BrowserMode, Look, PageState, Tab
from sandboxgym.envs.webshop.web.chromium import BrowserError, chosen_executable
from sandboxgym.errors import SnapshotCorrupt
from sandboxgym.spaces import Unicode

VIEWPORT = (1024, 768)


@dataclass(frozen=True, slots=True)
class BrowserState:
    """Snapshot state of `WebShopBrowserEnv`."""

    session: ShopState
    """The server's state of the episode; the address follows from it."""
    page: PageState
    """State of the page beyond what the address determines."""
    seen: str | bytes
    """Last observation; a screenshot as PNG."""


class WebShopBrowserEnv(WebShopEnv):
    """WebShop in a real browser: Chromium on the shop's own website, which runs inside this process.

    ## Description
    The same tasks, actions, rewards and information as `WebShopEnv` with ``compat="default"``. Every observation is
    read from the page in the browser, and every action is performed with its mouse and keyboard. All environments of a
    process share one browser and, per shop, one server on the loopback interface; each has its own browser context and
    session. The browser reaches that server and nothing else.

    Needs ``pip install 'sandboxgym[browser]'`` and a Chromium: the argument ``executable``, ``$SANDBOXGYM_CHROMIUM``,
    Playwright's own (``playwright install chromium``), or the first of chromium-headless-shell, chromium,
    chromium-browser, google-chrome, google-chrome-stable and chrome on the path. A headless shell, such as Playwright's
    own, creates contexts several times faster than a full browser. The browser runs headless, and with Chromium's own
    sandbox unless the user is root.

    ## Action Space
    A string. WebShop's: ``search[keywords]`` types into the search field and submits it, ``click[value]`` clicks the
    element with that name. Low-level, in pixels of the viewport:

    - ``mouse_click[x, y]``: click on a link, a button or the field; elsewhere it does nothing.
    - ``type[text]``: type at the caret, if the field has the focus.
    - ``press[key]``: press Enter, Backspace, Delete, ArrowLeft, ArrowRight, Home, End or Control+A, if the field has
      the focus.
    - ``scroll[dx, dy]``: scroll to the right and down.

    Any other action, or one that is impossible on the page, changes nothing, and ``info["valid_action"]`` is false.

    ## Observation Space
    Selected by ``observation_mode``. ``text``: the page's texts joined by `` [SEP] ``, equal to `WebShopEnv`'s.
    ``html``: the document. ``axtree``: the accessibility tree as Playwright's ``aria_snapshot`` writes it.
    ``screenshot``: an array of (height, width, 3) bytes. In addresses, ``visitor`` replaces the session's name.

    ## Rewards, Starting State, Episode End, Information
    As in `WebShopEnv`. ``state_hash`` is equal to that environment's until something is typed, focused or scrolled.

    ## Snapshots
    Of kind ``logical``: the server's session, from which the address follows; the text, selection and scroll position
    of the search field; the scroll position of the page; cookies and local storage; and the last observation. A restore
    is lazy: the browser opens the page before the next action or screenshot. A snapshot restores in any process on any
    machine; screenshots there may differ with the fonts and the browser.

    Snapshots leave out state that the shop does not depend on: the heap of scripts, ``sessionStorage``, the browser
    history (a restored page has nothing to go back to), pending requests, the undo history of the field, the position
    of the mouse pointer (which moves to the corner before every screenshot), and the browser's cache.

    ## Arguments
    - ``catalogue``, ``goals``, ``split``, ``tasks``, ``price_seed``, ``nouns``, ``pos``, ``search_backend``,
      ``show_attributes``: as in `WebShopEnv`.
    - ``observation_mode``: ``"text"``, ``"html"``, ``"axtree"`` or ``"screenshot"``.
    - ``viewport``: width and height in pixels.
    - ``executable``: path of the browser.
    - ``render_mode``: ``"rgb_array"``, a screenshot of the viewport.

    ## Version History
    - v0: first version.
    """

    card = BROWSER_CARD
    immutable_state = True
    apply_draws = False
    metadata: ClassVar[dict[str, Any]] = {"render_modes": ["rgb_array"], "render_fps": 4}  # type: ignore[misc]
    snapshot_spec = SnapshotSpec(kind="logical")

    def __init__(
        self,
        catalogue: str | os.PathLike[str] = "embedded",
        *,
        goals: Kind = "synthetic",
        split: Split | None = None,
        tasks: Sequence[int | str] | None = None,
        observation_mode: BrowserMode = "text",
        price_seed: int = 0,
        nouns: str | os.PathLike[str] | None = None,
        pos: str | Tagger = "embedded",
        search_backend: str = "bm25",
        show_attributes: bool = False,
        viewport: tuple[int, int] = VIEWPORT,
        executable: str | os.PathLike[str] | None = None,
        render_mode: str | None = None,
    ) -> None:
        if observation_mode not in get_args(BrowserMode):
            modes = get_args(BrowserMode)
            raise ValueError(f"expected observation_mode to be one of {modes}, found {observation_mode!r}")
        if len(viewport) != 2 or not all(isinstance(side, int) and 1 <= side <= 10_000 for side in viewport):
            raise ValueError(f"expected viewport to be a width and a height from 1 to 10000, found {viewport!r}")
        super().__init__(
            catalogue,
            goals=goals,
            split=split,
            tasks=tasks,
            price_seed=price_seed,
            nouns=nouns,
            pos=pos,
            search_backend=search_backend,
            show_attributes=show_attributes,
            render_mode=render_mode,
        )
        self.mode = observation_mode
        self.viewport = (viewport[0], viewport[1])
        self._executable = executable
        self._state: BrowserState | None = None
        self._tab: Tab | None = None
        self._shown: tuple[ShopState, PageState] | None = None
        self.action_space, self.observation_space = self._spaces()

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Begin an episode with a goal; see `WebShopEnv`.

        Raises:
            TaskNotFound: there is no such goal, or it is not in the split.
            ValueError: an option is unknown, or both ``"goal"`` and ``"task"`` are given.
            DependencyNotInstalled: Playwright or a browser is missing; the message says how to get it.
            BrowserError: the browser failed; the environment is unchanged.
        """
        gym.Env.reset(self, seed=seed)
        session = self.shop.start(self._goal(options or {}))
        tab = self._at(session, PageState.at_rest("search"))
        self._take(tab.look(), session)
        transition = self._transition()
        return transition.observation, transition.info

    def step(self, action: str) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Perform an action in the browser.

        Raises:
            BrowserError: the browser failed; the environment is in the state before the step.
        """
        if not isinstance(action, str):
            raise TypeError(f"expected an action as a string, found {action!r}")
        state = self._here()
        gesture = None if state.session.done else browser_actions.parse(action)
        if gesture is None:
            self._nothing_done(state)
            return self._transition()
        tab = self._at(state.session, state.page)
        self._shown = None  # until the effect of the gesture is known
        if tab.do(gesture):
            look = tab.look()
            moved = gesture.verb in ("search", "click") or (look.session, look.page) != (state.session, state.page)
            self._take(look, replace(look.session, valid_action=moved))
        else:
            self._nothing_done(state)
        return self._transition()

    def render(self) -> NDArray[np.uint8] | None:  # type: ignore[override]
        """Screenshot of the viewport, (height, width, 3), in mode ``rgb_array``."""
        if self.render_mode != "rgb_array":
            return None
        state = self._here()
        if isinstance(state.seen, bytes):
            return self._decoded(state.seen)
        return self._decoded(self._at(state.session, state.page).screenshot())

    def close(self) -> None:
        """Leave the shop; the browser ends with the last environment of the process. Idempotent."""
        tab, self._tab, self._shown = self._tab, None, None
        if tab is not None:
            tab.close()

    @property
    def tab(self) -> Tab:
        """The browser's page in the current state, for tests and screenshots."""
        state = self._here()
        return self._at(state.session, state.page)

    def _here(self) -> BrowserState:
        self._check_reset("a step")
        assert self._state is not None
        return self._state

    def _at(self, session: ShopState, page: PageState) -> Tab:
        """The browser's page, restored to a state."""
        tab = self._tab
        if tab is None:
            tab = self._tab = Tab(self.shop, self.mode, self.viewport, chosen_executable(self._executable))
            weakref.finalize(self, tab.close_soon).atexit = False
        if not tab.working or self._shown != (session, page):
            self._shown = None
            try:
                tab.show(session, page)
            except BrowserError:  # its page crashed, or the browser did
                tab.close()
                tab.show(session, page)
            self._shown = (session, page)
        return tab

    def _take(self, look: Look, session: ShopState) -> None:
        self._state, self._session = BrowserState(session, look.page, look.observation), session
        self._shown = (session, look.page)

    def _nothing_done(self, state: BrowserState) -> None:
        session = replace(state.session, reward=0.0, valid_action=False)
        if self._shown == (state.session, state.page):
            self._shown = (session, state.page)
        self._state, self._session = replace(state, session=session), session

    def _transition(self) -> Transition:
        state = self._state
        assert state is not None
        told = super()._transition()
        if state.page != PageState.at_rest(state.session.place.page):
            key = told.info["state_hash"].encode() + state.page.digestible()
            told.info["state_hash"] = blake2b(key, digest_size=16).hexdigest()
        seen = self._decoded(state.seen) if isinstance(state.seen, bytes) else state.seen
        return told._replace(observation=seen)

    def _decoded(self, png: bytes) -> NDArray[np.uint8]:
        try:
            from PIL import Image
        except ImportError as error:
            raise DependencyNotInstalled("pictures need Pillow: pip install 'sandboxgym[browser]'") from error
        with Image.open(io.BytesIO(png), formats=["PNG"]) as picture:
            if picture.size != self.viewport:
                raise SnapshotCorrupt(f"expected a picture of {self.viewport}, found {picture.size}")
            return np.asarray(picture.convert("RGB"))

    def _capture(self) -> BrowserState:  # type: ignore[override]
        return self._here()

    def _apply(self, state: BrowserState) -> None:  # type: ignore[override]
        self.shop.check(state.session)
        if isinstance(state.seen, bytes) != (self.mode == "screenshot"):
            raise SnapshotCorrupt(f"expected an observation in mode {self.mode}, found {type(state.seen).__name__}")
        self._state, self._session = state, state.session

    @classmethod
    def _encode(cls, state: BrowserState) -> bytes:  # type: ignore[override]
        return durable.pack([state.session.encode(), state.page.as_list(), state.seen])

    @classmethod
    def _decode(cls, data: bytes) -> BrowserState:  # type: ignore[override]
        match durable.unpack(data):
            case [bytes(session), page, str() | bytes() as seen]:
                return BrowserState(ShopState.decode(session), PageState.from_list(page), seen)
        raise SnapshotCorrupt(f"expected a session, a page and an observation, found {len(data)} other bytes")

    def _config(self) -> dict[str, Any]:
        return {**super()._config(), "observation_mode": self.mode, "viewport": list(self.viewport)}

    def _blank(self) -> Self:
        child = super()._blank()
        child._state = child._tab = child._shown = None
        child.action_space, child.observation_space = self._spaces()
        return child

    def _spaces(self) -> tuple[gym.Space[str], gym.Space[Any]]:
        width, height = self.viewport
        seen = spaces.Box(0, 255, (height, width, 3), np.uint8) if self.mode == "screenshot" else Unicode()
        return Unicode(HARMLESS), seen

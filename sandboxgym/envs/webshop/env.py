"""`WebShopEnv`: a thin Gymnasium layer over a shared `Shop` and a `ShopState`, a small immutable value."""

from __future__ import annotations

import bisect
import operator
import os
import random
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any, ClassVar, Literal, Self, SupportsIndex, cast, get_args

import numpy as np

from sandboxgym.core import Transition
from sandboxgym.envs.webshop.card import CARD
from sandboxgym.envs.webshop.expert import Expert
from sandboxgym.envs.webshop.goals import Goal, Kind, Split
from sandboxgym.envs.webshop.goals import split as split_of
from sandboxgym.envs.webshop.shop import Shop, Tagger, open_shop
from sandboxgym.envs.webshop.shop_state import Compat, ShopState
from sandboxgym.envs.webshop.text_pages import ObservationMode
from sandboxgym.spaces import Unicode
from sandboxgym.task_env import Task, TaskEnv, TaskNotFound, TaskRows

HARMLESS = ("click[back to search]", "search[shoes]")
"""Actions that can be undone or do nothing; the action space samples them."""
Progress = Literal["options", "worth"]
_SEEDS = 2**63


class WebShopEnv(TaskEnv[str, str]):
    """Shopping on the web: find the product that an instruction asks for, choose its options, buy it.

    ## Description
    Re-implementation of WebShop's text environment (Yao et al., 2022) that needs neither Java nor a web server. With
    ``compat="upstream"`` observations, available actions, addresses, rewards and flags are exactly the original's.
    ``compat="default"`` differs where an agent could exploit or stumble over the original:

    - A search needs the search bar (original: possible on every page).
    - Keywords are plain words (original: keywords that begin with ``<r>``, ``<c>`` or ``<q>`` list random products, a
      whole category, or the products behind a hidden query; ``<a>`` raises an error, but does nothing with
      ``compat="upstream"``).
    - The purchase ends the episode: afterwards nothing happens and ``terminated`` stays true (original: the episode
      continues, ``terminated`` is true only in the step of a purchase, and products can be bought again).
    - ``next >`` is only there if there are more results (original: always, leading to empty pages).
    - A chosen option is visible: `` (selected)`` follows it in ``text`` (original: choosing does not change ``text``)
      and ``text_rich`` marks exactly the chosen options (original: those whose quoted value is in the address, so none
      with quotes or non-ASCII letters, and some that were not chosen).
    - Every option can be chosen: a value that occurs in two groups, or equals the name of a button, is called
      ``group: value`` (original: the last group wins, or the button); values may contain ``[``.
    - ``click[search]``, which does nothing, is not listed.
    - The verb may be in any case, white space around verb and argument is ignored, and blanks are not keywords.
    - ``< prev`` goes one page back (original: derived from the address, which the keywords "search_results" break).
    - The last page shows the score (original: also invisible fields and a code for crowd workers).
    - If no goal is asked for, one is drawn uniformly (original: by weight, but never the first goal).

    In both modes, randomness that the original takes from a global stream is seeded: prices and price caps by
    ``price_seed``, the draws of ``<r>`` by ``reset``. Addresses contain the index of the goal instead of the session's
    name; ``prev_obs`` and images are not offered. Mode ``html`` uses this package's markup, not the original's
    templates.

    ``env.unwrapped.expert()`` is a rule-based player that sees only what an agent sees, in mode ``text`` or
    ``text_rich``.

    ## Action Space
    A string: ``search[keywords]`` or ``click[value]`` with a value from ``info["available_actions"]["clickables"]``.
    The argument is case-insensitive, and text after the last bracket is ignored. Anything else changes nothing.

    ## Observation Space
    A string: the page in the form that ``observation_mode`` selects. ``text``: the pieces of the page joined by
    `` [SEP] ``. ``text_rich``: one piece per line, with marks around what can be clicked. ``html``: a document.
    ``url``: the address only.

    ## Rewards
    0 except for the purchase, which gives 0 to 1: the fraction of the goal's attributes, options and price cap that the
    product and the chosen options meet, times 1, 0.5, 0.1 or 0 for how well the product's type fits.

    ## Starting State
    The search page with an instruction. ``reset(seed=…, options={"task": …})`` selects a goal of the split by its
    position (0 to ``num_tasks`` - 1) or id, such as ``"synthetic/12"``; ``options={"goal": …}`` by its index in the
    list of all goals, which is the original's ``session`` (and equals the position if there is no split or it is
    ``"test"``). Without either, a goal of the split is drawn from the environment's random stream.

    The order of goals and the splits depend only on the catalogue and the kind of goals, not on the seed, the worker or
    the process.

    ## Episode End
    Terminated by the purchase. Truncated by the step limit of ``gym.make``, 50 as in the BPO paper.

    ## Information
    ``available_actions`` (``has_search_bar`` and ``clickables``, as in the original), ``admissible_commands`` (actions
    that do something here: a click on each clickable element and, if there is a search bar, a search for the whole
    instruction; a search for other keywords is allowed too), ``instruction``, ``task_id``, ``success`` (the purchase
    was worth 1), ``valid_action`` (the last action did something), ``page_type`` (``search``, ``results``, ``item``,
    ``sub_page``, ``done``), ``state_hash`` (equal if and only if goal, page and products looked at are),
    ``progress_key`` and ``features`` (see ``progress`` and ``features`` below). After a purchase also ``reward_info``:
    ``r_type``, ``r_att``, ``r_option``, ``r_price``, the weights ``w_att``, ``w_option``, ``w_price``, the criteria for
    the type (``query_match``, ``category_match``, ``title_score``) and ``nouns``, the name of the tagger behind
    ``title_score``.

    ## Arguments
    - ``catalogue``: ``"embedded"`` (1,000 generated products), or a directory with the official files
      ``items_shuffle*.json``, ``items_ins_v2*.json`` and, for human goals, ``items_human_ins.json``.
    - ``goals``: ``"synthetic"`` or ``"human"``.
    - ``split``: ``None`` (all goals), the original's ``"test"`` (goals 0-499), ``"eval"`` (500-1499), ``"train"`` (the
      rest), or ``"product-test"``, ``"product-eval"``, ``"product-train"``, no two of which share a product.
    - ``tasks``: only these goals of the split, by position or id, in the order of the split.
    - ``observation_mode``: ``"text"``, ``"text_rich"``, ``"html"`` or ``"url"``.
    - ``compat``: ``"default"`` or ``"upstream"``, see above.
    - ``price_seed``: seed of the prices of products that show a range, and of the price caps in goals.
    - ``pos``: tagger of nouns in titles, for the type's part of the reward: ``"embedded"``, ``"spacy"`` (as in the
      original; needs spaCy and its model) or a function from a title to its nouns.
    - ``nouns``: a JSON file that maps titles to their nouns; ``pos`` tags the titles that are not in it.
    - ``search_backend``: ``"bm25"`` (the original's ranking) or ``"lucene"`` (the original's own search engine;
      ``pip install 'sandboxgym[webshop-lucene]'`` and Java 21 or later).
    - ``progress``: content of ``progress_key`` beyond the kind of page. ``"options"``: whether the page has the product
      that the goal was made from, and how many of the goal's options are chosen. ``"worth"``: the reward for buying
      now, or on a page of results its mean over the products, in tenths; for baselines and schedules, not for policies.
    - ``features``: whether to give ``info["features"]``, numbers from which a trainer may learn state values: the kind
      of page, the reward for buying now (as in ``"worth"``), and that reward with the goal's options chosen (on a page
      of results, for its best product). Privileged: no policy may see them.
    - ``show_attributes``: link item pages to a page with hidden attributes (the original's ``show_attrs``).
    - ``render_mode``: ``"ansi"`` (``text_rich``).

    ## Version History
    - v0: first version.
    """

    metadata: ClassVar[dict[str, Any]] = {  # type: ignore[misc]
        "render_modes": ["ansi"],
        "render_fps": 4,
        "unobservable": {
            "actions": "a record that the original keeps; no page, reward or info depends on it",
            "place.draw": 'only the search for random products draws, which there is with compat="upstream"',
        },
    }
    card = CARD
    immutable_state = True
    apply_draws = False

    def __init__(
        self,
        catalogue: str | os.PathLike[str] = "embedded",
        *,
        goals: Kind = "synthetic",
        split: Split | None = None,
        tasks: Sequence[int | str] | None = None,
        observation_mode: ObservationMode = "text",
        compat: Compat = "default",
        price_seed: int = 0,
        nouns: str | os.PathLike[str] | None = None,
        pos: str | Tagger = "embedded",
        search_backend: str = "bm25",
        show_attributes: bool = False,
        progress: Progress = "options",
        features: bool = False,
        render_mode: str | None = None,
    ) -> None:
        self.features = features
        if progress not in get_args(Progress):
            raise ValueError(f"expected progress to be one of {get_args(Progress)}, found {progress!r}")
        self.progress: Progress = progress
        if observation_mode not in get_args(ObservationMode):
            modes = get_args(ObservationMode)
            raise ValueError(f"expected observation_mode to be one of {modes}, found {observation_mode!r}")
        self.shop: Shop = open_shop(
            catalogue,
            goals,
            price_seed=price_seed,
            nouns=nouns,
            pos=pos,
            search_backend=search_backend,
            compat=compat,
            show_attributes=show_attributes,
        )
        self.goals_here: Sequence[int] = split_of(self.shop.goals, split)
        """Indices of the available goals in the list of all, ascending."""
        if tasks is not None:
            if isinstance(tasks, str) or not isinstance(tasks, Sequence):
                raise ValueError(f"tasks: expected a list of positions and ids, found {tasks!r}")
            self.goals_here = sorted({self._goal({"task": task}) for task in tasks})
            if not self.goals_here:
                raise ValueError("tasks: expected at least one, found none")
        self.observation_mode = observation_mode
        self.render_mode = render_mode
        self.observation_space = Unicode()
        self.action_space = Unicode(HARMLESS)
        self._session: ShopState | None = None

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        """Start with a goal; see *Starting State*.

        Raises:
            TaskNotFound: there is no such goal, or it is not in the split.
            ValueError: an option is unknown, or both ``"goal"`` and ``"task"`` are given.
        """
        super().reset(seed=seed)
        self._session = self.shop.start(self._goal(options or {}))
        transition = self._transition()
        return transition.observation, transition.info

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Search or click; see *Action Space*."""
        if not isinstance(action, str):
            raise TypeError(f"expected an action as a string, found {action!r}")
        self._session = self.shop.act(self._shopping(), action, draw=self._draw)
        return self._transition()

    def render(self) -> str | None:  # type: ignore[override]
        """The page in lines, in mode ``ansi``."""
        return self.shop.observe(self._shopping(), "text_rich") if self.render_mode == "ansi" else None

    def tasks(self, split: str | None = None) -> TaskRows:
        """The goals as rows; each is made when its row is read.

        Args:
            split: a value of the constructor's ``split``, with the same kind of goals and the same catalogue.
        """
        goals = self.shop.goals
        here = self.goals_here if split is None else split_of(goals, cast(Split, split))
        return TaskRows(len(here), lambda number: _row(goals[here[number]]))

    def task_index(self, task: str | SupportsIndex) -> int:
        """Position in the split of a goal given by position or id.

        Raises:
            TaskNotFound: there is no such goal, or it is not in the split.
        """
        return bisect.bisect_left(self.goals_here, self._goal({"task": task}))

    @property
    def session(self) -> ShopState:
        """State of the episode."""
        return self._shopping()

    def expert(self, *, rng: random.Random | None = None, noise: float = 0.0, **options: Any) -> Expert:
        """The rule-based shopper; it sees observations only, in mode ``text`` or ``text_rich``. See `Expert`."""
        return Expert(rng=rng, noise=noise, **options)

    def _goal(self, options: Mapping[str, Any]) -> int:
        unknown = options.keys() - {"goal", "task"}
        if unknown or len(options) > 1:
            raise ValueError(f"expected one of the options 'goal' and 'task', found {sorted(options)}")
        here, everything = self.goals_here, self.shop.goals
        wanted = next(iter(options.values()), None)
        if wanted is None:
            return self._drawn_goal()
        if isinstance(wanted, str):
            kind, _, number = wanted.partition("/")
            index = int(number) if number.isdecimal() else -1
            if kind == everything.kind and 0 <= index < len(everything) and self._has(index):
                return index
            raise TaskNotFound(f"expected a task such as {everything[here[0]].goal_id!r}, found {wanted!r}")
        wanted = operator.index(wanted)
        if "task" in options:
            if 0 <= wanted < len(here):
                return here[wanted]
            raise TaskNotFound(f"expected a task from 0 to {len(here) - 1}, found {wanted}")
        if 0 <= wanted < len(everything) and self._has(wanted):
            return wanted
        raise TaskNotFound(f"expected a goal of the split, from {here[0]} to {here[-1]}, found {wanted}")

    def _has(self, goal: int) -> bool:
        here = self.goals_here
        position = bisect.bisect_left(here, goal)
        return position < len(here) and here[position] == goal

    def _drawn_goal(self) -> int:
        here = self.goals_here
        if self.shop.compat == "default":
            return here[int(self.np_random.integers(len(here)))]
        ends = np.cumsum(self.shop.goals.weights()[np.asarray(here)])
        # Quirk: the original looks the draw up in [0, *ends], so it takes the next goal.
        position = int(np.searchsorted(ends, self.np_random.uniform(0, ends[-1]), side="right")) + 1
        return here[min(position, len(here) - 1)]

    def _draw(self) -> int:
        return int(self.np_random.integers(_SEEDS))

    def _shopping(self) -> ShopState:
        self._check_reset("a step")
        assert self._session is not None
        return self._session

    def _transition(self) -> Transition:
        session, shop = self._session, self.shop
        assert session is not None
        page = shop.page(session)
        bought, goal = page.view.purchase, page.goal
        info = {
            "available_actions": {
                "has_search_bar": page.view.has_search_bar,
                "clickables": list(page.clickables),
            },
            "admissible_commands": list(page.commands),
            "instruction": goal.instruction,
            "task_id": goal.goal_id,
            "success": bought is not None and bought.reward.total == 1.0,
            "valid_action": session.valid_action,
            "page_type": session.place.page,
            "progress_key": page.progress_key if self.progress == "options" else self._worth(session),
            "state_hash": page.state_hash,
        }
        if self.features:
            info["features"] = shop.features(session)
        if bought is not None:
            parts = {field.name: getattr(bought.reward, field.name) for field in fields(bought.reward)}
            info["reward_info"] = {**parts, "nouns": shop.nouns.name}
        return Transition(page.text(self.observation_mode), session.reward, session.done, False, info)

    def _worth(self, session: ShopState) -> str:
        prospect = self.shop.prospect(session)
        return session.place.page + ("" if prospect is None else f" {prospect:.1f}")

    def _capture(self) -> ShopState:
        assert self._session is not None
        return self._session

    def _apply(self, state: ShopState) -> None:
        self.shop.check(state)
        self._session = state

    @classmethod
    def _encode(cls, state: ShopState) -> bytes:
        return state.encode()

    @classmethod
    def _decode(cls, data: bytes) -> ShopState:
        return ShopState.decode(data)

    def _config(self) -> dict[str, Any]:
        # The split is left out: a snapshot fits every split that has its goal. So is the catalogue's path: its content
        # decides.
        shop = self.shop
        return {
            "catalogue": shop.catalogue.digest,
            "goals": shop.goals.kind,
            "price_seed": shop.goals.price_seed,
            "nouns": shop.nouns.name,
            "search": shop.search.name,
            "compat": shop.compat,
            "show_attributes": shop.show_attributes,
            "observation_mode": self.observation_mode,
            "progress": self.progress,
            **({"features": True} if self.features else {}),  # so that older snapshots stay valid
        }

    def _blank(self) -> Self:
        child = type(self).__new__(type(self))
        child.__dict__.update(self.__dict__)  # the shop is immutable and shared
        child.action_space, child.observation_space = Unicode(HARMLESS), Unicode()
        child._np_random = child._np_random_seed = None
        child._session, child._was_reset, child._lineage = None, False, None
        return child


def _row(goal: Goal) -> Task:
    return Task(goal.goal_id, goal.instruction)

"""`WebShopEnv`: the thin Gymnasium shell around a `Shop`, which is shared, and a `Session`, a small immutable value."""

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
from sandboxgym.envs.webshop.pages import ObservationMode
from sandboxgym.envs.webshop.session import Compat, Session
from sandboxgym.envs.webshop.shop import Shop, Tagger, open_shop
from sandboxgym.spaces import Unicode
from sandboxgym.task_env import Task, TaskEnv, TaskNotFound, TaskRows

HARMLESS = ("click[back to search]", "search[shoes]")
"""Actions that can be undone or do nothing: what the action space samples."""
Progress = Literal["options", "worth"]
_SEEDS = 2**63


class WebShopEnv(TaskEnv[str, str]):
    """Shopping on the web: find the product that an instruction asks for, choose its options, buy it.

    ## Description
    Re-implementation of WebShop's text environment (Yao et al., 2022) that needs neither Java nor a web server. With
    ``compat="upstream"`` observations, available actions, addresses, rewards and flags are the original's to the
    letter. ``compat="default"`` differs from it to close what an agent could exploit or trip over:

    - A search needs the search bar (original: possible on every page).
    - Keywords are words (original: those that begin with ``<r>``, ``<c>`` or ``<q>`` list random products, a whole
      category, or the products behind a hidden query; ``<a>`` is an error, for which ``"upstream"`` does nothing).
    - The purchase ends the episode: after it nothing happens and ``terminated`` stays true (original: all goes on,
      ``terminated`` is true in the step of a purchase only, products can be bought again and again).
    - ``next >`` is there only if more results are (original: always, and leads to empty pages).
    - A chosen option can be seen: `` (selected)`` follows it in ``text`` (original: choosing does not change ``text``)
      and ``text_rich`` marks exactly the chosen ones (original: those whose quoted value is in the address, so none
      with quotes or with letters beyond ASCII, and some that were not chosen).
    - Every option can be chosen: where a value is in two groups, or is like the name of a button, it is called
      ``group: value`` (original: the group that comes last, or the button); values with ``[`` are no problem.
    - ``click[search]``, which does nothing, is not listed.
    - The verb may be in any case, white space around verb and argument is ignored, blanks are no keywords.
    - ``< prev`` goes one page back (original: told from the address, so that the keywords "search_results" mislead it).
    - The last page shows the score (original: invisible fields and a code for workers, too).
    - If no goal is asked for, one is drawn evenly (original: by weight, but never the first goal).

    In both, what the original leaves to a global random stream is seeded: prices and price caps by ``price_seed``, what
    ``<r>`` draws by ``reset``. Where the original has a session's name in addresses, there is the index of the goal;
    ``prev_obs`` and images are not offered. Mode ``html`` is markup of our own, not the original's templates.

    ``env.unwrapped.expert()`` is a rule-based player that sees only what an agent sees, in mode ``text`` or
    ``text_rich``.

    ## Action Space
    A string: ``search[keywords]`` or ``click[value]`` with a value out of ``info["available_actions"]["clickables"]``.
    Upper and lower case of the argument do not matter, what follows the last bracket is ignored. Anything else changes
    nothing.

    ## Observation Space
    A string: the page in the form that ``observation_mode`` asks for. ``text``: the pieces of the page joined by
    `` [SEP] ``. ``text_rich``: one on each line, with marks around what can be clicked. ``html``: a document. ``url``:
    the address only.

    ## Rewards
    0 but for the purchase, which gives 0 to 1: the share of the goal's attributes, options and price cap that the
    product and the chosen options meet, times 1, 0.5, 0.1 or 0 for how well its type fits.

    ## Starting State
    The search page with an instruction. ``reset(seed=…, options={"task": …})`` asks for a goal of the split by its
    position in it (0 to ``num_tasks`` - 1) or by its id, such as ``"synthetic/12"``; ``options={"goal": …}`` by its
    index in the list of all goals, which is what the original's ``session`` is (and the position, if there is no split
    or it is ``"test"``). Without either, a goal of the split is drawn from the environment's random stream.

    The order of goals and the splits depend on the catalogue and the kind of goals alone: not on the seed, the worker
    or the process.

    ## Episode End
    Terminated by the purchase. Truncated by the step limit of ``gym.make``, 50 as in the BPO paper.

    ## Information
    ``available_actions`` (``has_search_bar`` and ``clickables``, as in the original), ``admissible_commands`` (actions
    that do something here: a click on everything that can be clicked and, where there is a search bar, a search for the
    whole instruction, instead of which any keywords will do), ``instruction``, ``task_id``, ``success`` (the purchase
    was worth 1), ``valid_action`` (the last action did something), ``page_type`` (``search``, ``results``, ``item``,
    ``sub_page``, ``done``), ``state_hash`` (equal if and only if goal, page and products looked at are),
    ``progress_key`` (see ``progress``), ``features`` (see there). After a purchase also ``reward_info``: ``r_type``,
    ``r_att``, ``r_option``, ``r_price``, the weights ``w_att``, ``w_option``, ``w_price``, what the type was told from
    (``query_match``, ``category_match``, ``title_score``) and ``nouns``, the name of the tagger behind ``title_score``.

    ## Arguments
    - ``catalogue``: ``"embedded"`` (1,000 generated products), or a directory with the official files
      ``items_shuffle*.json``, ``items_ins_v2*.json`` and, for human goals, ``items_human_ins.json``.
    - ``goals``: ``"synthetic"`` or ``"human"``.
    - ``split``: ``None`` (all goals), the original's ``"test"`` (goals 0-499), ``"eval"`` (500-1499), ``"train"`` (the
      rest), or ``"product-test"``, ``"product-eval"``, ``"product-train"``, of which no two share a product.
    - ``tasks``: only these goals of the split, by position or id; they keep their order.
    - ``observation_mode``: ``"text"``, ``"text_rich"``, ``"html"`` or ``"url"``.
    - ``compat``: ``"default"`` or ``"upstream"``, see above.
    - ``price_seed``: of the prices of products that show a range, and of the price caps in goals.
    - ``pos``: what tells nouns in titles, for the type's part of the reward: ``"embedded"``, ``"spacy"`` (as the
      original; needs spaCy and its model) or a function from a title to its nouns.
    - ``nouns``: a JSON file from titles to their nouns; ``pos`` is left with the titles that are not in it.
    - ``search_backend``: ``"bm25"`` (the original's ranking) or another one that ``open_search`` knows.
    - ``progress``: what ``progress_key`` has beside the kind of page. ``"options"``: whether it has the product that
      the goal was made from, how many of the goal's options are chosen. ``"worth"``: what buying now would earn, or on
      a page of results the mean of its products, in tenths: for baselines and schedules, not for policies.
    - ``features``: whether to give ``info["features"]``, numbers that a trainer may learn state values from: the kind
      of page, what buying now would earn (as ``"worth"``) and what it would with the goal's options chosen (on a page
      of results, of its best product). Privileged: no policy may see them.
    - ``show_attributes``: item pages lead to a page with hidden attributes (the original's ``show_attrs``).
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
        """Indices of the goals that can be asked for in the list of all, ascending."""
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
        self._session: Session | None = None

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        """Start with a goal; see *Starting State*.

        Raises:
            TaskNotFound: there is no such goal, or it is not in the split.
        """
        super().reset(seed=seed)
        self._session = self.shop.start(self._goal(options or {}))
        transition = self._transition()
        return transition.observation, transition.info

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Search or click."""
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
            split: as ``split`` of the constructor, of the same kind of goals in the same catalogue.
        """
        goals = self.shop.goals
        here = self.goals_here if split is None else split_of(goals, cast(Split, split))
        return TaskRows(len(here), lambda number: _row(goals[here[number]]))

    def task_index(self, task: str | SupportsIndex) -> int:
        """Position of a goal in the split, given by that or by its id.

        Raises:
            TaskNotFound: there is no such goal, or it is not in the split.
        """
        return bisect.bisect_left(self.goals_here, self._goal({"task": task}))

    @property
    def session(self) -> Session:
        """Where the episode is."""
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
        # Quirk: the original looks the draw up in [0, *ends], one place too high.
        position = int(np.searchsorted(ends, self.np_random.uniform(0, ends[-1]), side="right")) + 1
        return here[min(position, len(here) - 1)]

    def _draw(self) -> int:
        return int(self.np_random.integers(_SEEDS))

    def _shopping(self) -> Session:
        self._check_reset("a step")
        assert self._session is not None
        return self._session

    def _transition(self) -> Transition:
        session, shop = self._session, self.shop
        assert session is not None
        page = shop.page(session)
        bought = page.view.purchase
        goal = shop.goals[session.goal]
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
        return Transition(shop.observe(session, self.observation_mode), session.reward, session.done, False, info)

    def _worth(self, session: Session) -> str:
        prospect = self.shop.prospect(session)
        return session.place.page + ("" if prospect is None else f" {prospect:.1f}")

    def _capture(self) -> Session:
        return self._shopping()

    def _apply(self, state: Session) -> None:
        self.shop.check(state)
        self._session = state

    @classmethod
    def _encode(cls, state: Session) -> bytes:
        return state.encode()

    @classmethod
    def _decode(cls, data: bytes) -> Session:
        return Session.decode(data)

    def _config(self) -> dict[str, Any]:
        # Not the split: any that this goal is in will do. Not the place of the catalogue: its content decides.
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

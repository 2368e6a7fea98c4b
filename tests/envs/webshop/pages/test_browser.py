"""The shop in a real Chromium equals the text environment, and its snapshots hold what they declare."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from components import missing
from gymnasium.error import DependencyNotInstalled
from little_shop import MUG, nouns, write

import sandboxgym
from sandboxgym import Snapshot, SnapshotCorrupt, SnapshotMismatch
from sandboxgym.envs.webshop.browser import WebShopBrowserEnv
from sandboxgym.envs.webshop.site.server import Server, Site
from sandboxgym.envs.webshop.web import chromium
from sandboxgym.envs.webshop.web.browser_actions import Gesture, parse
from sandboxgym.envs.webshop.web.browser_page import PageState
from sandboxgym.envs.webshop.web.leases import Leases
from sandboxgym.system import run_directories

ID, TEXT_ID = "sandboxgym/WebShopBrowser-v0", "sandboxgym/WebShop-v0"
Make = Callable[..., Any]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("little"))


@pytest.fixture(scope="module")
def browser(directory: Path) -> Iterator[WebShopBrowserEnv]:
    """An environment that lives as long as the module, so that its tests share one browser."""
    env = WebShopBrowserEnv(directory, pos=nouns)
    try:
        env.reset(seed=0)
    except DependencyNotInstalled as error:
        missing("browser", str(error))
    yield env
    env.close()


@pytest.fixture
def make(browser: WebShopBrowserEnv, directory: Path) -> Iterator[Make]:
    opened = []

    def made(**arguments: Any) -> Any:
        env = gym.make(ID, catalogue=str(directory), **{"pos": nouns, **arguments})
        opened.append(env)
        return env

    yield made
    for env in opened:
        env.close()


def mug_task(env: Any) -> str:
    return next(
        goal.goal_id
        for goal in env.unwrapped.shop.goals
        if goal.asin == MUG and dict(goal.options) == {"color": "red", "size": "small"}
    )


BUY = ("search[striped mug]", f"click[{MUG.lower()}]", "click[red]", "click[small]", "click[buy now]")
INVALID = ("click[nothing]", "click[search]", "search[]", "search", "think[hm]", "click[Buy now", "press[F5]")


def same(browser: Any, text: Any, action: str) -> tuple[Any, ...]:
    """Step both, which must agree in everything."""
    ours, theirs = browser.step(action), text.step(action)
    assert ours == theirs, action
    return ours


def check_random_play(env: Any, text: Any, seed: int, steps: int) -> int:
    rng = random.Random(seed)
    task = rng.randrange(env.unwrapped.num_tasks)
    _, info = both = env.reset(options={"task": task})
    assert both == text.reset(options={"task": task})
    for number in range(steps):
        commands = info["admissible_commands"]
        if rng.random() < 0.1 or not commands:
            action = rng.choice(INVALID)
        elif info["available_actions"]["has_search_bar"] and rng.random() < 0.5:
            action = f"Search[ {rng.choice(['Mug/Lamp', 'shoe rack', 'wall hook', 'a]b'])} ]"
        else:
            action = rng.choice(commands)
        *_, terminated, _, info = same(env, text, action)
        if terminated:
            return number
    return steps


def test_agrees_with_the_text_environment(make: Make, directory: Path) -> None:
    env, text = make(), gym.make(TEXT_ID, catalogue=str(directory), pos=nouns)
    assert sum(check_random_play(env, text, seed, 6) for seed in range(3)) > 8
    task = {"task": mug_task(env)}
    assert env.reset(options=task) == text.reset(options=task)
    for action in BUY:
        _, reward, terminated, _, info = same(env, text, action)
    assert (reward, terminated, info["success"]) == (1.0, True, True)
    for action in ("click[back to search]", "search[mug]", "mouse_click[100, 20]"):
        same(env, text, action)  # after the end nothing happens


@pytest.mark.slow
def test_agrees_on_the_embedded_catalogue(make: Make) -> None:
    env, text = gym.make(ID), gym.make(TEXT_ID)
    try:
        assert sum(check_random_play(env, text, seed, 20) for seed in range(12)) > 100
    finally:
        env.close()


@pytest.mark.slow
def test_agrees_on_the_actions_of_the_recordings(browser: Any, parity_data: Path) -> None:
    folder = parity_data / "webshop"
    arguments = {"catalogue": str(folder), "nouns": str(folder / "title_nouns.json")}
    env, text = (
        gym.make(ID, **arguments, max_episode_steps=1000),
        gym.make(TEXT_ID, **arguments, max_episode_steps=1000),
    )
    steps = 0
    try:
        with (folder / "golden_synthetic.jsonl").open() as lines:
            for episode in itertools.islice(map(json.loads, lines), 0, None, 4):
                goal = {"goal": episode["session"]}
                assert env.reset(options=goal) == text.reset(options=goal)
                for step in episode["steps"]:
                    same(env, text, step["action"])
                    steps += 1
    finally:
        env.close()
    assert steps > 80


def test_a_purchase_by_hand_alone(make: Make) -> None:
    env = make()
    env.reset(options={"task": mug_task(env)})

    def click(name: str) -> tuple[Any, ...]:
        x, y = env.unwrapped.tab.run(
            f"""() => {{ const box = document.querySelector('[data-name="{name}"]').getBoundingClientRect();
            return [Math.round(box.x + box.width / 2), Math.round(box.y + box.height / 2)]; }}"""
        )
        return env.step(f"mouse_click[{x}, {y}]")

    assert env.step("type[Mug]")[4]["valid_action"]
    for action in ("press[Control+A]", "type[tripedx mug]", "press[Home]", "type[S]"):
        assert env.step(action)[4]["valid_action"], action
    for _ in range(6):
        env.step("press[ArrowRight]")
    env.step("press[Backspace]")
    assert env.unwrapped.tab.look().page == PageState(typed="Stripex mug", caret=(6, 6))
    for action in ("type[d]", "press[Delete]"):
        assert env.step(action)[4]["valid_action"], action
    *_, info = env.step("press[Enter]")
    assert info["page_type"] == "results" and env.unwrapped.session.place.query == "striped mug"
    for name in (MUG.lower(), "red", "small"):
        *_, info = click(name)
        assert info["valid_action"] and info["page_type"] == "item"
    _, reward, terminated, _, info = click("buy now")
    assert (reward, terminated, info["success"]) == (1.0, True, True)


def test_what_cannot_be_done_changes_nothing(make: Make) -> None:
    env = make(max_episode_steps=1000)
    env.reset(options={"task": mug_task(env)})
    nothing = (
        *INVALID,
        "mouse_click[3, 3]",
        "mouse_click[-1, 3]",
        "mouse_click[9999, 3]",
        "mouse_click[x]",
        "scroll[0, 9]",
    )
    nothing += ("press[Enter]", "type[]", "press[Tab]", "scroll[1]")  # an empty field is not sent
    for place in ((), ("search[mug]",), (f"click[{MUG.lower()}]",)):
        for action in place:
            env.step(action)
        before = env.unwrapped.last
        typing = ("type[x]", "press[Backspace]") if place else ()
        for action in (*nothing, *typing):
            observation, reward, terminated, truncated, info = env.step(action)
            assert (observation, reward, terminated, truncated) == (before.observation, 0.0, False, False), action
            assert info == {**before.info, "valid_action": False}, action
        assert env.unwrapped.tab.look().page == PageState.at_rest(info["page_type"])


@pytest.mark.parametrize("mode", ["html", "axtree", "screenshot"])
def test_modes(make: Make, mode: str) -> None:
    env = make(observation_mode=mode, viewport=(400, 300))
    observation, info = env.reset(options={"task": mug_task(env)})
    assert env.observation_space.contains(observation)
    second, *_ = env.step("search[striped mug]")
    assert env.observation_space.contains(second)
    (child,) = env.fork(1)
    env.step("click[back to search]")
    again, *_ = child.step("click[nothing]")
    fresh = child.unwrapped.tab.look()
    env.close(), child.close()
    if mode == "screenshot":
        assert observation.shape == (300, 400, 3) and len(np.unique(observation)) > 10
        assert np.array_equal(again, second) and not np.array_equal(observation, second)
        assert np.array_equal(child.unwrapped._decoded(fresh.observation), second)
        return
    assert info["instruction"] in observation and MUG in second and "/s/visitor/" in second
    assert again == second == fresh.observation


def type_and_scroll(make: Make) -> Any:
    """An environment with a long text in its field, the caret within, and the page scrolled."""
    env = make(viewport=(300, 200), render_mode="rgb_array")
    env.reset(options={"task": mug_task(env)})
    for action in (
        "type[striped mug or anything that is long enough to slide]",
        *["press[ArrowLeft]"] * 3,
        "scroll[0, 40]",
    ):
        assert env.step(action)[4]["valid_action"], action
    return env


def test_a_snapshot_holds_what_was_typed_and_where_it_was_scrolled(make: Make, tmp_path: Path) -> None:
    env = type_and_scroll(make)
    there = env.unwrapped.tab.look()
    assert there.page.typed.startswith("striped") and there.page.slid > 0 and there.page.scroll[1] > 0
    assert there.page.caret == (len(there.page.typed) - 3,) * 2
    picture, last = env.render(), env.unwrapped.last
    snap = env.snapshot()
    snap.save(tmp_path / "snap")
    env.step("search[lamp]")
    other = make(viewport=(300, 200), render_mode="rgb_array")
    for target, source in ((env, snap), (other, Snapshot.load(tmp_path / "snap"))):
        observation, info = target.restore(source)
        assert (observation, info) == (last.observation, last.info)
        look = target.unwrapped.tab.look()
        assert (look.page, look.observation) == (there.page, there.observation)
        assert np.array_equal(target.render(), picture)
        target.step("type[!]")
        assert target.unwrapped.tab.look().page.typed == there.page.typed[:-3] + "!" + there.page.typed[-3:]


def test_state_hash_tells_states_apart(make: Make, directory: Path) -> None:
    env, text = make(), gym.make(TEXT_ID, catalogue=str(directory), pos=nouns)
    task = {"task": mug_task(env)}
    start = env.reset(options=task)[1]["state_hash"]
    assert start == text.reset(options=task)[1]["state_hash"]
    typed = env.step("type[mug]")[4]["state_hash"]
    moved = env.step("press[Home]")[4]["state_hash"]
    back = env.step("press[End]")[4]["state_hash"]
    assert typed == back and len({start, typed, moved}) == 3
    env.step("press[Control+A]")
    assert env.step("press[Backspace]")[4]["state_hash"] == start


@pytest.mark.slow
def test_eight_forks_act_independently(make: Make, directory: Path) -> None:
    env, text = make(), gym.make(TEXT_ID, catalogue=str(directory), pos=nouns)
    task = {"task": mug_task(env)}
    env.reset(options=task), text.reset(options=task)
    for action in BUY[:2]:
        same(env, text, action)
    parent = env.unwrapped.last
    ways = ("red", "sea blue", "small", 'large 3"', "description", "buy now", "back to search", "< prev")
    children, models = env.fork(8), text.fork(8)
    try:
        for child, model, way in zip(children, models, ways, strict=True):
            same(child, model, f"click[{way}]")
        for child, model in zip(children, models, strict=True):
            look = child.unwrapped.tab.look()
            assert look.observation == model.unwrapped.last.observation
            commands = model.unwrapped.last.info["admissible_commands"]
            same(child, model, commands[-1] if commands else "click[red]")
        assert len({child.unwrapped.tab._sid for child in (env, *children)}) == 9
        assert env.unwrapped.tab.look().observation == parent.observation
        children[0].close()
        same(env, text, "click[red]")
        same(children[1], models[1], "click[nothing]")
    finally:
        for child in children:
            child.close()


def test_a_restore_undoes_a_purchase(make: Make) -> None:
    env = make()
    env.reset(options={"task": mug_task(env)})
    for action in BUY[:-1]:
        env.step(action)
    snap = env.snapshot()
    for _ in range(2):
        assert env.step(BUY[-1])[1:3] == (1.0, True)
        bought = env.snapshot()
        env.restore(snap)
    (child,) = env.fork(1)
    child.restore(bought)
    assert child.unwrapped.tab.look().observation.endswith("1.0")
    assert child.step("click[red]")[2]
    child.close()


def test_kept_and_not_kept_is_as_declared(make: Make) -> None:
    """Storage is kept; the heap of scripts, session storage and the history are not."""
    env = make()
    env.reset(options={"task": mug_task(env)})
    for action in BUY[:3]:
        env.step(action)
    env.unwrapped.tab.run(
        "() => { document.cookie = 'a=1'; localStorage.b = '2'; sessionStorage.c = '3'; window.d = 4; }"
    )
    env.step("scroll[0, 1]"), env.step("click[red]")  # looks at the page again
    read = "() => [document.cookie, localStorage.b, sessionStorage.c, window.d, history.length]"
    env.unwrapped.tab.run("() => { window.d = 4; }")
    here = env.unwrapped.tab.run(read)
    assert here[:4] == ["a=1", "2", "3", 4] and here[4] > 3
    (child,) = env.fork(1)
    there = child.unwrapped.tab.run(read)
    assert there[:4] == ["a=1", "2", None, None] and there[4] <= 2
    child.unwrapped.tab.run("() => { localStorage.b = 'other'; document.cookie = 'a=other'; }")
    assert env.unwrapped.tab.run(read) == here
    clean = make()
    clean.reset(options={"task": mug_task(clean)})
    assert clean.unwrapped.tab.run(read)[:2] == ["", None]
    child.close()
    assert type(env.unwrapped).snapshot_spec.kind == env.unwrapped.metadata["snapshot"]["kind"] == "logical"
    told = " ".join((WebShopBrowserEnv.__doc__ or "").split())
    for words in ("heap of scripts", "sessionStorage", "browser history", "pending requests"):
        assert words in told


def test_a_restore_costs_nothing_until_the_browser_is_needed(make: Make) -> None:
    env = make()
    env.reset(options={"task": mug_task(env)})
    (child,) = env.fork(1)
    child.restore(child.snapshot())
    child.step("not an action")
    assert child.unwrapped._tab is None and child.unwrapped.last.info["page_type"] == "search"


def test_snapshots_that_do_not_fit_are_refused(make: Make) -> None:
    env = make()
    env.reset(options={"task": mug_task(env)})
    before = env.unwrapped.last
    base = env.unwrapped.snapshot()
    with pytest.raises(SnapshotMismatch):
        make(viewport=(300, 200)).unwrapped.restore(base)
    with pytest.raises(SnapshotMismatch):
        make(observation_mode="html").unwrapped.restore(base)
    pack, session = sandboxgym.serialization.pack, env.unwrapped.session.encode()
    page = PageState().as_list()
    for state in (
        b"",
        pack([session, page, 3]),
        pack([session, page[:3], ""]),
        pack([b"", page, ""]),
        pack([session, page, b"x"]),
    ):
        forged = Snapshot(base.header, None, blob={**base._sections(), "state": state})
        with pytest.raises(SnapshotCorrupt):
            env.unwrapped.restore(forged)
    assert env.unwrapped.last == before


@pytest.mark.slow
def test_reaches_the_shop_and_nothing_else(make: Make, directory: Path) -> None:
    env = make()
    env.reset()
    tab = env.unwrapped.tab
    asked = []

    class Other(Site):
        def get(self, address: str) -> Any:
            asked.append(address)
            return super().get(address)

    page = tab._call(tab._context.new_page())  # the environment's own would still be on its way to an error page
    with Server(Other(env.unwrapped.shop)) as other:
        for address in (other.url, other.url.replace("127.0.0.1", "localhost"), "http://example.com/"):
            with pytest.raises(chromium.BrowserError):
                tab._call(page.goto(address, timeout=10_000))
    assert not asked
    assert "Instruction:" in env.step("click[nothing]")[0]


@pytest.mark.slow
@pytest.mark.parametrize("what", ["browser", "page"])
def test_goes_on_if_the_browser_died(directory: Path, browser: WebShopBrowserEnv, what: str) -> None:
    env = WebShopBrowserEnv(directory, pos=nouns)
    env.reset(options={"task": mug_task(env)})
    env.step("type[striped mug]")
    tab = env.tab
    if what == "page":
        with pytest.raises(chromium.BrowserError):
            tab._call(tab._page.goto("chrome://crash", timeout=10_000))
        with pytest.raises(chromium.BrowserError):
            env.step("press[Home]")
    else:
        tab._call(tab._chromium.value._browser.close())
    try:
        assert env.step("press[Enter]")[4]["page_type"] == "results"
        assert browser.tab.look().observation == browser.last.observation
    finally:
        env.close()


@pytest.mark.slow
def test_many_threads_and_other_event_loops(make: Make) -> None:
    envs = [make() for _ in range(3)]
    rewards: dict[int, float] = {}

    def shop(number: int) -> None:
        async def inside_a_loop() -> None:
            env = envs[number]
            env.reset(options={"task": mug_task(env)})
            for action in BUY:
                rewards[number] = env.step(action)[1]

        asyncio.run(inside_a_loop())

    threads = [threading.Thread(target=shop, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert rewards == {0: 1.0, 1: 1.0, 2: 1.0}


def test_a_missing_browser_is_a_sentence(directory: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(
        DependencyNotInstalled, match=r"argument executable names 'nowhere'.*playwright install chromium"
    ):
        WebShopBrowserEnv(directory, pos=nouns, executable="nowhere").reset()
    monkeypatch.setenv(chromium.VARIABLE, str(tmp_path))
    with pytest.raises(DependencyNotInstalled, match="SANDBOXGYM_CHROMIUM names"):
        WebShopBrowserEnv(directory, pos=nouns).reset()
    monkeypatch.delenv(chromium.VARIABLE)
    monkeypatch.setitem(sys.modules, "playwright.async_api", None)
    with pytest.raises(DependencyNotInstalled, match=r"pip install 'sandboxgym\[browser\]'"):
        chromium.Chromium("")


@pytest.mark.slow
def test_no_browser_on_the_path(browser: WebShopBrowserEnv, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chromium, "ON_PATH", ())
    monkeypatch.setenv("PLAYWRIGHT_BROWSERS_PATH", str(directory))
    with pytest.raises(DependencyNotInstalled, match=r"no Chromium was found\. Run: playwright install chromium"):
        chromium.Chromium("")
    with pytest.raises(DependencyNotInstalled, match="does not start"):
        chromium.Chromium(sys.executable)


@pytest.mark.parametrize("argument", [{"observation_mode": "url"}, {"viewport": (0, 5)}, {"viewport": (1, 2, 3)}])
def test_bad_arguments(directory: Path, argument: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"expected {next(iter(argument))}"):
        WebShopBrowserEnv(directory, pos=nouns, **argument)


def test_gestures() -> None:
    assert parse("click[Buy Now]") == Gesture("click", "buy now")
    assert parse("type[A]b] c") == Gesture("type", "A]b")
    assert parse(" SCROLL[ -3,4 ]") == Gesture("scroll", x=-3, y=4)
    assert parse("press[control+a]") == Gesture("press", "Control+A")
    for nothing in (
        "",
        "type[]",
        "press[Tab]",
        "mouse_click[1]",
        "mouse_click[1, 2, 3]",
        "scroll[1.5, 2]",
        "hover[1, 2]",
    ):
        assert parse(nothing) is None


def test_what_is_leased_closes_with_its_last_user() -> None:
    class Thing:
        def __init__(self, key: str) -> None:
            self.alive, self.key, self.closed = True, key, 0

        def close(self) -> None:
            self.closed += 1

    leases: Leases[str, Thing] = Leases(Thing)
    first, second, other = leases.take("a"), leases.take("a"), leases.take("b")
    assert first.value is second.value and first.value is not other.value
    first.release(), first.release()
    assert not first.valid and second.valid and second.value.closed == 0
    second.value.alive = False
    third = leases.take("a")
    assert third.value is not second.value and not second.valid
    second.release()
    assert second.value.closed == 1 and third.value.closed == 0 and third.valid
    leases._forget()  # in a forked child
    assert leases.take("b").value is not other.value
    leases._close_all()


@pytest.fixture
def short_directory() -> Iterator[Path]:
    """Chromium has a socket in the temporary directory, whose path may not be long."""
    with tempfile.TemporaryDirectory(prefix="sg-") as name:
        yield Path(name)


CHILD = """
import sys
from sandboxgym.envs.webshop.browser import WebShopBrowserEnv
env = WebShopBrowserEnv()
env.reset(seed=0)
print("there", flush=True)
if sys.argv[1] == "forgets":
    sys.exit()
elif sys.argv[1] == "drops":
    del env
    import gc, time
    gc.collect()
    time.sleep(3)
    import threading
    print([thread.name for thread in threading.enumerate()], flush=True)
else:
    sys.stdin.read()
"""


def processes_under(root: int) -> list[int]:
    """A process and its descendants, except those that ended and wait for somebody to notice."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            fields = (entry / "stat").read_text(errors="replace").rpartition(")")[2].split()
        except OSError:
            continue
        if fields[0] not in "ZX":
            parents[int(entry.name)] = int(fields[1])
    found = [root] if root in parents else []
    for process in found:
        found += [child for child, parent in parents.items() if parent == process]
    return found


def running(processes: list[int]) -> list[int]:
    return [process for process in processes if processes_under(process)]


def wait_until(condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + 300
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="processes are read from /proc")
@pytest.mark.parametrize("end", ["forgets", "drops", "terminated", "killed", "all killed"])
def test_nothing_is_left_however_the_process_ends(
    browser: Any, tmp_path: Path, short_directory: Path, end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime, scratch = tmp_path / "runtime", short_directory
    environment = {**os.environ, "SANDBOXGYM_RUNTIME": str(runtime), "TMPDIR": str(scratch)}
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, end], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    )
    with child:
        assert child.stdin and child.stdout
        assert child.stdout.readline() == "there\n"
        family = processes_under(child.pid)
        if end in ("terminated", "killed"):
            assert len(family) > 3
            child.send_signal(signal.SIGTERM if end == "terminated" else signal.SIGKILL)
        elif end == "all killed":
            for process in family:
                with contextlib.suppress(ProcessLookupError):  # some end with those before them
                    os.kill(process, signal.SIGKILL)
        elif end == "drops":
            assert "MainThread" in child.stdout.readline()
            child.stdin.close()
        child.wait(300)
    assert wait_until(lambda: not running(family))

    def clean() -> bool:
        return not [path for path in scratch.iterdir() if "profile" in path.name]

    if end == "all killed":
        assert not clean()
        monkeypatch.setenv("SANDBOXGYM_RUNTIME", str(runtime))
        assert any(left.removed for left in run_directories.reap())
    assert wait_until(clean)
    if end in ("forgets", "drops"):
        assert not list(runtime.glob("browser-*"))


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="processes are read from /proc")
def test_the_browser_ends_with_the_last_environment(
    directory: Path, browser: WebShopBrowserEnv, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chromium, "leases", Leases(chromium.Chromium))  # hence a browser of its own
    before = processes_under(os.getpid())
    env = WebShopBrowserEnv(directory, pos=nouns)
    env.reset(seed=0)
    (child,) = env.fork(1)
    child.step("search[mug]")
    more = [process for process in processes_under(os.getpid()) if process not in before]
    env.close()
    assert running(more)
    child.close()
    child.close()
    assert wait_until(lambda: not running(more))

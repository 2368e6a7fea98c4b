"""Kill workers and trainers at random points, and compare what comes out with an undisturbed run, bit for bit.

    python tests/bpo_ref/kills.py --out kills.jsonl --trainer 60 --rollout 200 --worker 120 --stop 20 --ray 6
    python tests/bpo_ref/kills.py --out kills.jsonl --table

A *trainer* kill is SIGKILL to a process that trains a tiny policy, continued with ``--resume`` and killed again; a
*rollout* kill is SIGKILL to one that rolls out random actions with a journal; a *worker* kill to a worker process of a
rollout, *stop* is SIGSTOP to one, which then counts as lost after a timeout, and *ray* is SIGKILL to the process of an
actor. Every trial appends one line to the file.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import pickle
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parents[1]
sys.path[:0] = [str(TESTS / room) for room in ("support", "tree", "bpo_ref")]

import gymnasium as gym  # noqa: E402
import toy_envs  # noqa: E402
from test_tree import Wanderer, sampled  # noqa: E402

import sandboxgym  # noqa: E402, F401
from sandboxgym.tree import Action, Context, Envs, Failure, TopEntropy, rollout  # noqa: E402
from sandboxgym.tree.journal import Journal  # noqa: E402
from sandboxgym.workers.pool import PooledEnvs  # noqa: E402

toy_envs.register()

MARK = "SANDBOXGYM_KILLS_TRIAL"
SETTINGS: dict[str, Any] = {
    "max_turns": 6, "context": 160, "max_new_tokens": 4, "sft_steps": 1, "sft_episodes": 6, "sft_batch": 4,
    "prompts": 4, "width": 2, "eval_episodes": 2, "eval_every": 100, "save_every": 2, "lr": 1e-2,
    "eval_untrained": False, "trackers": (), "env_id": "wordgame:toys/WordGame-v0",
}  # fmt: skip
ALFWORLD = {"env_id": "sandboxgym/ALFWorld-v0", "max_turns": 5, "context": 768, "prompts": 2, "save_every": 1}


ENVS = ("toys/Dice-v0", "sandboxgym/ALFWorld-v0")
PLACES = ("local", "process")


class Chooser(Wanderer):
    """Chooses an admissible command, or one of the ``choices``, from the path's stream."""

    choices: Sequence[Any] = (0, 1)

    def record(self, action: Action) -> Any:
        return [action.text, action.entropy, action.position]

    def recall(self, contexts: Sequence[Context], records: Sequence[Any]) -> list[Action | None]:
        return [Action(text, entropy=entropy, position=at, tokens=3) for text, entropy, at in records]

    def _act(self, context: Context) -> Action:
        commands = context.info.get("admissible_commands") or self.choices
        drawn = commands[int(context.rng.integers(len(commands)))]
        return Action(drawn, entropy=context.rng.random(), position=10 * context.depth, tokens=3)


def marked(mark: str) -> list[int]:
    """Processes that live in the environment of a trial, this one excepted."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            if f"{MARK}={mark}".encode() in (entry / "environ").read_bytes():
                found.append(int(entry.name))
        except OSError:
            continue
    return found


@contextmanager
def trial() -> Iterator[tuple[str, Path]]:
    """A mark for all processes of a trial, and a folder for it."""
    mark = os.urandom(8).hex()
    os.environ[MARK] = mark
    folder = Path(tempfile.mkdtemp(prefix="kills-"))
    try:
        yield mark, folder
    finally:
        os.environ.pop(MARK, None)
        shutil.rmtree(folder, ignore_errors=True)


def leftovers(mark: str, seconds: float = 60.0) -> int:
    """Processes of a trial that do not end by themselves within these seconds."""
    deadline = time.monotonic() + seconds
    while (left := marked(mark)) and time.monotonic() < deadline:
        time.sleep(0.2)
    return len(left)


# Trainers.


def trained(out: Path, options: dict[str, Any]) -> int:
    """Start a process that trains; its number. It is a copy of this one, where PyTorch is loaded already."""
    return forked(partial(train, out, options), out.with_suffix(".log"))


def forked(job: Callable[[], Any], log: Path) -> int:
    """Start a copy of this process that does a job; its number."""
    if pid := os.fork():
        return pid
    status = 1
    try:
        sink = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(sink, 1)
        os.dup2(sink, 2)
        job()
        status = 0
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
    finally:
        os._exit(status)


def train(out: Path, options: dict[str, Any]) -> None:
    """Train in this process."""
    from bpo_ref.args import Args
    from bpo_ref.train import Trainer

    Trainer(Args(**{**SETTINGS, "out": str(out), **options})).run()


def finish(pid: int, out: Path) -> None:
    """Wait for a process that trains.

    Raises:
        RuntimeError: it failed.
    """
    _, status = os.waitpid(pid, 0)
    if status:
        raise RuntimeError(f"training ended with status {status}: {out.with_suffix('.log').read_text()[-3000:]}")


def outcome(out: Path) -> str:
    """Digest of a run's weights, trees and numbers, times excepted."""
    digest = hashlib.sha256()
    (weights,) = (out / "checkpoint").glob("*.safetensors")
    digest.update(weights.read_bytes())
    digest.update((out / "trees.json").read_bytes())
    steps = {}
    for line in map(json.loads, (out / "metrics.jsonl").read_text().splitlines()):
        steps[line["stage"], line["step"], "update/loss" in line] = {
            name: value
            for name, value in line.items()
            if not name.startswith("time/") and "seconds" not in name and name != "rollout/env_failures"
        }
    digest.update(repr(sorted(steps.items())).encode())
    return digest.hexdigest()


def journal_size(out: Path) -> int:
    """Bytes of the journals of the updates under way."""
    return sum(path.stat().st_size for path in (out / "inflight").glob("update-*") if path.exists())


def kill_trainers(base: Path, whole: str, options: dict[str, Any], rng: random.Random, most: int) -> dict[str, Any]:
    """Train from a folder with kills at random points; what came out."""
    with trial() as (mark, folder):
        out, kills, recalled = folder / "run", 0, 0
        shutil.copytree(base, out)
        options = {**options, "resume": True}
        if options.get("env_store"):
            options["env_store"] = str(folder / "store")
        while True:
            before, until = journal_size(out), rng.expovariate(1 / 2000)
            pid = trained(out, options)
            deadline, done = time.monotonic() + rng.uniform(5, 60), False
            while kills < most and time.monotonic() < deadline and journal_size(out) < before + until and not done:
                time.sleep(0.005)
                done = ended(pid)
            if done or kills >= most:
                finish(pid, out)
                break
            time.sleep(rng.uniform(0, 0.05))
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            kills += 1
            recalled += journal_size(out) > 0
        same = outcome(out) == whole
        left = leftovers(mark) + (out / "inflight").exists() + len(list(out.glob("*.new")))
        return {"kills": kills, "in_update": recalled, "differing": 0 if same else 1, "leftovers": left}


def trainer_trials(out: Path, kills: int, rng: random.Random) -> None:
    import matplotlib.pyplot  # noqa: F401 - before the processes are copied

    import bpo_ref.train  # noqa: F401

    kinds: list[tuple[str, dict[str, Any]]] = [
        ("words, this process", {}),
        ("words, worker process", {"envs": "process", "env_workers": 1}),
        ("words, worker process, store", {"envs": "process", "env_workers": 1, "env_store": "yes"}),
        ("ALFWorld, worker process", {"envs": "process", "env_workers": 1, **ALFWORLD}),
    ]
    with tempfile.TemporaryDirectory(prefix="kills-base-") as top:
        known: dict[str, tuple[Path, str]] = {}
        while kills > 0:
            for name, options in kinds:
                place = "alfworld" if "ALFWorld" in name else "words"
                rule = {
                    key: value
                    for key, value in options.items()
                    if key not in ("envs", "env_workers", "env_store", "journal")
                }
                if place not in known:
                    base = Path(top) / place
                    finish(trained(base, {**rule, "updates": 1}), base)
                    whole = Path(top) / f"{place}-whole"
                    shutil.copytree(base, whole)
                    finish(trained(whole, {**rule, "updates": 4, "resume": True, "journal": "off"}), whole)
                    known[place] = base, outcome(whole)
                found = kill_trainers(*known[place], {**options, "updates": 4}, rng, 8)
                append(out, {"kind": f"trainer killed: {name}", **found})
                kills -= found["kills"]
                if kills <= 0:
                    return


# Processes of rollouts, with a policy that costs nothing.


def kill_rollouts(out: Path, kills: int, rng: random.Random) -> None:
    """Rollouts in a process that is killed at random points, and continued by another one."""
    schedule = TopEntropy(points=2, width=3, roots=2)
    kinds = [(env, kind, recall) for env in ENVS for kind in PLACES for recall in (False, True)]
    known: dict[str, Any] = {}
    while kills > 0:
        for env, kind, recall in [each for each in kinds for _ in range(8 if each[1] == "local" else 1)]:
            options: dict[str, Any] = {"tasks": [None if "toys" in env else n for n in range(3)], "seed": (7,)}
            if env not in known:
                with made("local", env, limits(env)) as envs:
                    known[env] = sampled(rollout(envs, Chooser(), schedule, **options))
            with trial() as (mark, folder):
                store = {"store": folder / "store"} if kind == "process" and rng.random() < 0.5 else {}

                def child(
                    result: Path,
                    env: str = env,
                    kind: str = kind,
                    recall: bool = recall,
                    store: Any = store,
                    options: Any = options,
                ) -> None:
                    journal = Journal(result.with_name("journal"), head={"env": env}, recall=recall)
                    with made(kind, env, {**limits(env), **store}) as envs:
                        trees = rollout(envs, Chooser(), schedule, journal=journal, **options)
                    result.write_bytes(pickle.dumps(sampled(trees)))

                struck = inside = 0
                journal, result = folder / "journal", folder / "result"
                while not result.exists():
                    size = journal.stat().st_size if journal.exists() else 0
                    until = size + rng.expovariate(1 / 3000)
                    pid = forked(partial(child, result), folder / "log")
                    while not ended(pid) and (not journal.exists() or journal.stat().st_size < until):
                        time.sleep(0.001)
                    time.sleep(rng.uniform(0, 0.003))
                    if ended(pid):
                        if os.waitpid(pid, 0)[1]:
                            raise RuntimeError((folder / "log").read_text()[-3000:])
                        continue
                    os.kill(pid, signal.SIGKILL)
                    os.waitpid(pid, 0)
                    struck += 1
                    inside += not result.exists()
                differing = pickle.loads(result.read_bytes()) != known[env]
                left = leftovers(mark)
            place = f"{env.rpartition('/')[2]}, {kind}{', store' * bool(store)}, {'quick' if recall else 'exact'}"
            found = {"kills": struck, "in_update": inside, "differing": int(differing), "leftovers": left}
            append(out, {"kind": f"rollout killed: {place}", **found})
            kills -= struck
            if kills <= 0:
                return


def limits(env: str) -> dict[str, Any]:
    """Arguments of an environment."""
    return {} if "toys" in env else {"max_episode_steps": 12}


def ended(pid: int) -> bool:
    """True if a child has ended, which is still to be waited for."""
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


# Workers.


def worker_trials(out: Path, kills: int, rng: random.Random, *, number: int, env: str, kind: str) -> None:
    """Rollouts in which workers get a signal at random times."""
    options: dict[str, Any] = {"tasks": [None if "toys" in env else 0, None if "toys" in env else 1] * 2, "seed": (7,)}
    schedule = TopEntropy(points=2, width=3)
    arguments = limits(env)
    whole: Any = None
    while kills > 0 or whole is None:
        with trial() as (mark, folder):
            store = {"store": folder / "store"} if rng.random() < 0.5 else {}
            with made(kind, env, {**arguments, **store, "timeout": 1.0 if number == signal.SIGSTOP else 60.0}) as envs:
                if whole is None:
                    whole = sampled(rollout(envs, Chooser(), schedule, **options))
                policy = Striking(envs, kind, number, rng)
                failures: list[Failure] = []
                trees = rollout(envs, policy, schedule, retries=500, failures=failures, **options)
                differing = sampled(trees) != whole
            left = leftovers(mark) if kind != "ray" else 0
        dropped = sum(failure.dropped for failure in failures)
        what = {signal.SIGKILL: "killed", signal.SIGSTOP: "stopped"}[signal.Signals(number)]
        entry = {"kind": f"worker {what}: {env.rpartition('/')[2]}, {kind}{', store' * bool(store)}"}
        append(out, {**entry, "kills": policy.struck, "differing": int(differing) + dropped, "leftovers": left,
                     "in_update": len(failures)})  # fmt: skip
        kills -= policy.struck


def made(kind: str, env: str, arguments: dict[str, Any]) -> Any:
    """A source of environments, in this process or in two workers."""
    if kind == "local":
        return Envs(lambda: gym.make(env, **arguments))
    if kind == "process":
        return PooledEnvs(env, 2, **arguments)
    from sandboxgym.workers.fleet import RayEnvs

    return RayEnvs(env, 2, **arguments)


class Striking(Chooser):
    """Sends a signal to a worker while a step is under way, or between steps."""

    def __init__(self, envs: Any, kind: str, number: int, rng: random.Random) -> None:
        self.envs, self.kind, self.number, self.rng, self.struck = envs, kind, number, rng, 0

    def __call__(self, contexts: Sequence[Context]) -> list[Action | None]:
        if self.rng.random() < 0.6:
            worker = self.rng.choice(self.envs._slots).worker
            if worker.alive and worker.pid:
                self.struck += 1
                threading.Timer(self.rng.uniform(0, 0.01), strike, (worker.pid, self.number)).start()
        return super().__call__(contexts)


def strike(pid: int, number: int) -> None:
    """Send a signal to a process that may have ended."""
    with suppress(ProcessLookupError):
        os.kill(pid, number)


def append(out: Path, entry: dict[str, Any]) -> None:
    """Add the line of a trial."""
    with out.open("a") as file:
        file.write(json.dumps(entry) + "\n")
    print(entry, flush=True)


def table(out: Path) -> str:
    """The table of all trials."""
    rows: dict[str, list[int]] = {}
    for line in map(json.loads, out.read_text().splitlines()):
        row = rows.setdefault(line["kind"], [0] * 5)
        for at, value in enumerate((1, line["kills"], line["in_update"], line["differing"], line["leftovers"])):
            row[at] += value
    rows = dict(sorted(rows.items()))
    rows["all"] = [sum(column) for column in zip(*rows.values())]
    head = "| what | trials | signals | with losses | differing | leftovers |\n|---|---|---|---|---|---|\n"
    return head + "".join(f"| {name} | {' | '.join(map(str, row))} |\n" for name, row in rows.items())


def main() -> None:
    """Run the trials that the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--table", action="store_true")
    for name in ("trainer", "rollout", "worker", "stop", "ray"):
        parser.add_argument(f"--{name}", type=int, default=0, help="number of signals")
    args = parser.parse_args()
    rng = random.Random(args.seed)
    if args.table:
        print(table(args.out), end="")
        return
    if args.trainer:
        trainer_trials(args.out, args.trainer, rng)
    if args.rollout:
        kill_rollouts(args.out, args.rollout, rng)
    for env in ENVS:
        if args.worker:
            worker_trials(args.out, args.worker // 2, rng, number=signal.SIGKILL, env=env, kind="process")
        if args.stop:
            worker_trials(args.out, args.stop // 2, rng, number=signal.SIGSTOP, env=env, kind="process")
    if args.ray:
        worker_trials(args.out, args.ray, rng, number=signal.SIGKILL, env="sandboxgym/ALFWorld-v0", kind="ray")


if __name__ == "__main__":
    main()

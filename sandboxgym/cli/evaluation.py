"""``sandboxgym eval``: evaluate a model behind an OpenAI-compatible endpoint, or a checkpoint, on an environment.

    sandboxgym eval ALFWorld-v0 --base-url http://localhost:8000/v1 --model my-model --samples 4 --concurrency 16

With ``--checkpoint`` this is `bpo_ref.eval`, which needs the trainer's packages; an endpoint needs none of them.

For an endpoint, the same command continues an interrupted or killed evaluation and counts nothing twice. Episodes whose
requests or environments failed are errors, which are counted and never scored.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import os
import queue
import re
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO, get_args

import gymnasium as gym
from gymnasium import spaces

import sandboxgym
from sandboxgym.adapters.chat import Aborted, ChatClient, EndpointError
from sandboxgym.adapters.prompts import ANYWHERE, Prompt, PromptName, make_prompt
from sandboxgym.adapters.prompts import FORMAT as ANSWER_FORMAT
from sandboxgym.cli import FAILED, INTERRUPTED, OK, USAGE, CommandError
from sandboxgym.cli.environments import add_kwargs, find_spec, import_modules, parse_kwargs, see_this_folder
from sandboxgym.cli.environments import make as make_env
from sandboxgym.cli.support import evaluation_report as report
from sandboxgym.cli.support.episodes import FORMAT, Key, Record, Store, Task, play
from sandboxgym.spaces import Unicode
from sandboxgym.system.modules import import_callable
from sandboxgym.task_env import task_count
from sandboxgym.tree.files import save_trees
from sandboxgym.tree.page import page

TASKS = 20
"""Default number of tasks."""
STEPS = 100
"""Maximum number of answers per episode if neither the environment nor the command line sets it."""
SHOWN_TASKS = 40
SHOWN_TREES = 200
LOST = 10
"""Number of failed episodes in a row, at least one per worker, after which the evaluation stops."""
PATIENCE = 10.0
"""Seconds that workers have to stop."""
_VERSIONED = re.compile(r"-v\d+$")


def main(argv: Sequence[str]) -> int:
    """Run ``sandboxgym eval``; returns the exit status."""
    if any(argument.partition("=")[0] == "--checkpoint" for argument in argv):
        from sandboxgym.cli.passing import eval_main

        return eval_main(argv)
    options = parser().parse_args(argv)
    import_modules(options.modules)
    maker = environment(options.env_id, parse_kwargs(options.kwargs), options.max_steps)
    subject = look(maker, options)
    client = endpoint(options)
    settings = settings_of(options, subject)
    folder = Path(options.out) if options.out else default_folder(options.env_id, options.model)
    with Store(folder, settings, may_change=("base_url",)) as store:
        return Evaluation(options, subject, maker, client, store).run()


def parser() -> argparse.ArgumentParser:
    """Parser of the options."""
    made = argparse.ArgumentParser(
        prog="sandboxgym eval",
        allow_abbrev=False,
        description="Evaluate a model behind an OpenAI-compatible endpoint on an environment's tasks: success rate "
        "with a 95 % interval, results per task, and a page of all episodes. The same command resumes an interruption.",
        epilog="For a checkpoint of the trainer: sandboxgym eval --checkpoint DIR; sandboxgym eval --checkpoint DIR "
        "--help lists its options. Exit status: 0 success, 1 failure or some episodes have errors, 2 wrong usage, "
        "130 interrupted.",
    )
    made.add_argument(
        "env_id",
        metavar="ENV",
        help="ALFWorld-v0, package.module:Name-v0, or a function or class that makes it (module:name)",
    )
    add_kwargs(made)
    made.add_argument(
        "--import", dest="modules", nargs="+", default=[], metavar="MODULE", help="modules to import first"
    )
    group = made.add_argument_group("the endpoint")
    group.add_argument(
        "--base-url", required=True, metavar="URL", help="address of the endpoint, such as http://localhost:8000/v1"
    )
    group.add_argument("--model", required=True, help="name of the model at the endpoint")
    group.add_argument(
        "--api-key-env",
        default="OPENAI_API_KEY",
        metavar="NAME",
        help="environment variable with the API key (default: OPENAI_API_KEY; no key if it is not set)",
    )
    group.add_argument("--temperature", type=_number(0), default=1.0, help="sampling temperature (default: 1)")
    group.add_argument(
        "--max-tokens", type=_whole(1), default=512, metavar="N", help="maximum tokens per answer (default: 512)"
    )
    group.add_argument(
        "--option",
        nargs="+",
        action="extend",
        default=[],
        metavar="NAME=VALUE",
        help="further fields of every request, as JSON or text (top_p=0.9); NAME=null removes a field "
        "(max_tokens=null max_completion_tokens=512)",
    )
    group.add_argument(
        "--timeout", type=_number(0, above=True), default=120.0, help="seconds per request (default: 120)"
    )
    group.add_argument("--retries", type=_whole(0), default=4, help="retries of a failed request (default: 4)")
    group.add_argument("--concurrency", type=_whole(1), default=8, metavar="N", help="parallel episodes (default: 8)")
    group.add_argument("--price-in", type=_number(0), metavar="PRICE", help="price per million prompt tokens")
    group.add_argument("--price-out", type=_number(0), metavar="PRICE", help="price per million generated tokens")
    group = made.add_argument_group("the episodes")
    which = group.add_mutually_exclusive_group()
    which.add_argument(
        "--tasks", type=_count, metavar="N", help=f"play the first N tasks, or all (default: {TASKS}, or all if fewer)"
    )
    which.add_argument("--task-ids", nargs="+", metavar="TASK", help="play these tasks, by index or id")
    group.add_argument("--samples", type=_whole(1), default=1, metavar="N", help="episodes per task (default: 1)")
    group.add_argument("--seed", type=_whole(0), default=0, help="seed of environments and requests (default: 0)")
    group.add_argument(
        "--max-steps",
        type=_whole(1),
        metavar="N",
        help=f"maximum answers per episode (default: the environment's limit, or {STEPS})",
    )
    group.add_argument(
        "--prompt",
        choices=get_args(PromptName),
        default="react",
        help="prompt format: thoughts and one tagged action, the bare action, or a number (default: react)",
    )
    group.add_argument("--list-actions", action="store_true", help="list the admissible actions in every message")
    group.add_argument("--history", type=_whole(0), default=0, metavar="K", help="show the last K turns (default: all)")
    group.add_argument("--system", metavar="TEXT", help="system prompt (default: the environment's)")
    made.add_argument("--out", metavar="DIR", help="folder of the results (default: runs/eval/ENV-MODEL)")
    made.add_argument("--quiet", action="store_true", help="no progress on standard error")
    return made


def _whole(least: int) -> Callable[[str], int]:
    def read(text: str) -> int:
        if not re.fullmatch(r"[0-9]{1,18}", text) or int(text) < least:
            raise argparse.ArgumentTypeError(f"expected a whole number from {least} on, found {text!r}")
        return int(text)

    return read


def _number(least: float, *, above: bool = False) -> Callable[[str], float]:
    def read(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not math.isfinite(value) or value < least or (above and value == least):
            how = "above" if above else "from"
            raise argparse.ArgumentTypeError(f"expected a number {how} {least}, found {text!r}")
        return value

    return read


def _count(text: str) -> int:
    """Parse a number of tasks; 0 means all."""
    return 0 if text == "all" else _whole(1)(text)


def environment(env_id: str, kwargs: dict[str, Any], max_steps: int | None) -> Callable[[], gym.Env[Any, Any]]:
    """Maker of the environment, from a Gymnasium id, or from a function or class named ``module:name``.

    Raises:
        CommandError: there is no such environment, function or class.
    """
    see_this_folder()
    if ":" not in env_id or _VERSIONED.search(env_id):
        spec = find_spec(env_id)
        more = {} if max_steps is None else {"max_episode_steps": max_steps}
        return functools.partial(make_env, spec.id, {**more, **kwargs})
    try:
        return functools.partial(import_callable(env_id), **kwargs)
    except (ImportError, AttributeError, ValueError) as error:
        raise CommandError(f"no environment {env_id!r}: {error}", status=USAGE) from error


@dataclass(frozen=True)
class EvaluatedAgent:
    """Properties of an environment, known before anything is played."""

    tasks: tuple[Task, ...]
    named: bool
    """True if ``reset`` takes the task; otherwise the seed determines the episode."""
    available: int | None
    limit: int
    space: gym.Space[Any]


def look(maker: Callable[[], gym.Env[Any, Any]], options: argparse.Namespace) -> EvaluatedAgent:
    """Make the environment once, to check that it can be made and which tasks it has.

    Raises:
        CommandError: it cannot be made, or has fewer tasks than asked for.
    """
    try:
        env = maker()
    except CommandError:
        raise
    except Exception as error:  # whatever a factory raises
        raise CommandError(f"{options.env_id} could not be made: {type(error).__name__}: {error}") from error
    try:
        if not isinstance(env, gym.Env):
            raise CommandError(f"{options.env_id}: expected a gymnasium.Env, found {type(env).__name__}")
        available = task_count(env)
        limit = options.max_steps or (env.spec.max_episode_steps if env.spec is not None else None) or STEPS
        space = env.action_space
    finally:
        env.close()
    if available == 0:
        raise CommandError(f"{options.env_id} has no tasks")
    if options.task_ids:
        tasks = tuple(dict.fromkeys(int(text) if text.isdecimal() else text for text in options.task_ids))
        wrong = [t for t in tasks if isinstance(t, int) and available is not None and t >= available]
        if wrong:
            raise CommandError(f"there is no task {wrong[0]}: {options.env_id} has {available} tasks", status=USAGE)
        if available is None and any(isinstance(task, str) for task in tasks):
            raise CommandError(f"{options.env_id} has no tasks (num_tasks): --task-ids are seeds there", status=USAGE)
        return EvaluatedAgent(tasks, available is not None, available, limit, space)
    number = options.tasks
    if number == 0 and available is None:
        raise CommandError(f"{options.env_id} does not say how many tasks it has: give --tasks N", status=USAGE)
    if number is not None and available is not None and number > available:
        raise CommandError(f"--tasks {number}: {options.env_id} has {available} tasks", status=USAGE)
    number = available if number == 0 else number or min(TASKS, TASKS if available is None else available)
    return EvaluatedAgent(tuple(range(number or 0)), available is not None, available, limit, space)


def endpoint(options: argparse.Namespace) -> ChatClient:
    """Client of the endpoint.

    Raises:
        CommandError: the address or the key is invalid.
    """
    fields = {"temperature": options.temperature, "max_tokens": options.max_tokens, **parse_kwargs(options.option)}
    if taken := sorted({"model", "messages", "stream", "n"} & fields.keys()):
        raise CommandError(f"--option {taken[0]}: it is set by the evaluation", status=USAGE)
    try:
        return ChatClient(
            options.base_url,
            options.model,
            api_key=os.environ.get(options.api_key_env) or None,
            timeout=options.timeout,
            retries=options.retries,
            options=fields,
        )
    except ValueError as error:
        raise CommandError(f"--{str(error).replace('base_url', 'base-url')}", status=USAGE) from error


def prompt_of(options: argparse.Namespace, space: gym.Space[Any]) -> Prompt:
    """Prompt of the model; it explains the form of actions if they are not text."""
    system = options.system
    if system is None and not isinstance(space, (Unicode, spaces.Text)):
        how = f"An action is one of {space}: a number, numbers with blanks between them, or JSON."
        system = f"{ANYWHERE} {how}" + (f"\n\n{ANSWER_FORMAT}" if options.prompt == "react" else "")
    return make_prompt(
        options.prompt, options.env_id, system=system, list_actions=options.list_actions, history=options.history
    )


def settings_of(options: argparse.Namespace, subject: EvaluatedAgent) -> dict[str, Any]:
    """Settings on which the results depend; an evaluation is only continued with the same ones."""
    return {
        "env": options.env_id,
        "kwargs": parse_kwargs(options.kwargs),
        "tasks": list(subject.tasks),
        "samples": options.samples,
        "seed": options.seed,
        "max_steps": subject.limit,
        "base_url": options.base_url,
        "model": options.model,
        "temperature": options.temperature,
        "max_tokens": options.max_tokens,
        "option": parse_kwargs(options.option),
        "prompt": options.prompt,
        "list_actions": options.list_actions,
        "history": options.history,
        "system": options.system,
    }


def default_folder(env_id: str, model: str) -> Path:
    """Default folder of the results, ``runs/eval/ENV-MODEL``."""
    name = f"{env_id.rpartition('/')[2]}-{model.rpartition('/')[2]}"
    return Path("runs", "eval", re.sub(r"[^A-Za-z0-9.]+", "-", name).strip(".-")[:120] or "run")


class Evaluation:
    """An evaluation: the remaining episodes, the threads that play them, and the report."""

    def __init__(
        self,
        options: argparse.Namespace,
        subject: EvaluatedAgent,
        maker: Callable[[], gym.Env[Any, Any]],
        client: ChatClient,
        store: Store,
    ) -> None:
        self.options, self.subject, self.maker, self.client, self.store = options, subject, maker, client, store
        self.prompt = prompt_of(options, subject.space)
        keys = [(task, sample) for sample in range(options.samples) for task in subject.tasks]
        self.todo = [key for key in keys if not store.ended(key)]
        self.asked = len(keys)
        self._jobs: queue.SimpleQueue[Key] = queue.SimpleQueue()
        self._results: queue.SimpleQueue[Record | BaseException | None] = queue.SimpleQueue()
        self._stop = threading.Event()
        self._row = 0
        """Number of errors since the last episode that ended."""

    def run(self) -> int:
        """Play the remaining episodes and report; returns the exit status."""
        progress = EvaluationProgress(sys.stderr, self.asked, quiet=self.options.quiet)
        before = self.asked - len(self.todo)
        self._introduce(before)
        problem: BaseException | None = None
        if self.todo:
            problem = self._play(progress)
            progress.clear()
        if self.store.records:
            try:
                self._report()
            except CommandError:
                if problem is None:  # else the problem is told, which is probably the reason
                    raise
        if isinstance(problem, KeyboardInterrupt):
            print(f"interrupted; the same command continues ({self.store.folder})", file=sys.stderr)
            return INTERRUPTED
        if isinstance(problem, (EndpointError, CommandError)):
            there = f"\nThe same command continues: {self.store.folder} has what was played."
            raise CommandError(f"{problem}{there if self.store.records else ''}")
        if problem is not None:
            raise problem
        failed = [record for record in self.store.records.values() if record["error"] is not None]
        if failed:
            print(f"first error: {failed[0]['error']['what']}", file=sys.stderr)
            print(f"{len(failed)} episodes have errors; the same command plays them again", file=sys.stderr)
        return FAILED if failed else OK

    def _introduce(self, before: int) -> None:
        if self.options.quiet:
            return
        of = "" if self.subject.available in (None, len(self.subject.tasks)) else f" of {self.subject.available}"
        count, samples = len(self.subject.tasks), self.options.samples
        print(
            f"{self.options.env_id}: {count}{of} task{'s' * (count != 1)} x {samples} sample{'s' * (samples != 1)}, "
            f"{self.options.model} at {self.options.base_url}\ninto {self.store.folder}"
            + (f": {before} of {self.asked} episodes are there" if before else "")
            + "".join(f"\n{name} was {values[-1]} before" for name, values in self.store.earlier.items()),
            file=sys.stderr,
        )

    def _play(self, progress: EvaluationProgress) -> BaseException | None:
        """Play; returns the error that ended it early, if any."""
        for key in self.todo:
            self._jobs.put(key)
        workers = [
            threading.Thread(target=self._work, name=f"sandboxgym-eval-{number}", daemon=True)
            for number in range(min(self.options.concurrency, len(self.todo)))
        ]
        problem: BaseException | None = None
        try:
            progress.show(self.store.records.values())
            for worker in workers:
                worker.start()
            working = len(workers)
            while working and problem is None:
                result = self._results.get()
                if result is None:
                    working -= 1
                elif isinstance(result, BaseException):
                    problem = result
                else:
                    problem = self._keep(result)
                    progress.show(self.store.records.values())
        except (KeyboardInterrupt, CommandError) as error:
            problem = error
        finally:
            self._stop.set()
            self.client.abort()
        end = time.monotonic() + PATIENCE
        for worker in workers:
            if worker.ident is not None:
                worker.join(max(0.0, end - time.monotonic()))
        while not self._results.empty() and not isinstance(problem, CommandError):
            result = self._results.get()
            if isinstance(result, dict):  # an episode that ended while the others were stopped
                self.store.add(result)
        return problem

    def _keep(self, record: Record) -> BaseException | None:
        self.store.add(record)
        self._row = 0 if record["error"] is None else self._row + 1
        if self._row >= max(LOST, self.options.concurrency):
            return CommandError(f"{self._row} episodes failed one after the other: {record['error']['what']}")
        return None

    def _work(self) -> None:
        """Work of one thread, which makes, uses and closes its own environment (browsers require it)."""
        env: gym.Env[Any, Any] | None = None
        try:
            while not self._stop.is_set():
                try:
                    key = self._jobs.get_nowait()
                except queue.Empty:
                    break
                env, record, error = play(
                    self.maker,
                    env,
                    self.client,
                    self.prompt,
                    key,
                    seed=self.options.seed,
                    limit=self.subject.limit,
                    named=self.subject.named,
                )
                if isinstance(error, EndpointError) and (error.hopeless or not self.client.answered):
                    self._results.put(error)  # every other episode would fail in the same way: not recorded
                    break
                self._results.put(record)
        except Aborted:
            env = None
        except BaseException as error:  # SystemExit in an environment, too: the main thread raises it
            self._results.put(error)
        finally:
            if env is not None:
                try:
                    env.close()
                except Exception as error:  # its episodes are already recorded
                    print(f"an environment could not be closed: {error}", file=sys.stderr)
            self._results.put(None)

    def _report(self) -> None:
        tasks, records = self.subject.tasks, self.store.records
        summary = report.summarise(
            tasks,
            self.options.samples,
            records,
            self.store.spent,
            price_in=self.options.price_in,
            price_out=self.options.price_out,
        )
        lines = report.headlines(summary)
        episodes = [{name: value for name, value in record.items() if name != "turns"} for record in records.values()]
        content = {
            "format": FORMAT,
            "version": sandboxgym.__version__,
            "settings": settings_of(self.options, self.subject),
            "earlier": self.store.earlier,
            "summary": summary,
            "episodes": episodes,
        }
        self.store.write("results.json", json.dumps(content, indent=1, allow_nan=False))
        title = f"{self.options.env_id}, {self.options.model}"
        table = "\n".join(report.task_table(summary))
        self.store.write("report.md", f"# {title}\n\n```text\n" + "\n".join(lines) + f"\n```\n\n{table}\n")
        grown = report.trees(tasks, records)
        try:
            save_trees(grown, self.store.folder / "trees.json")
        except OSError as error:
            raise CommandError(f"{self.store.folder / 'trees.json'}: {error.strerror or error}") from error
        shown = f" (the first {SHOWN_TREES} of {len(grown)} trees)" if len(grown) > SHOWN_TREES else ""
        self.store.write("trees.html", page(grown[:SHOWN_TREES], title=title + shown))
        if summary["models"] not in ([], [self.options.model]):
            lines.insert(0, f"answered by {', '.join(summary['models'])}")
        print("\n".join(lines))
        if len(tasks) > 1 and summary["ended"]:
            print("\n" + "\n".join(report.task_table(summary, SHOWN_TASKS)))
            if len(tasks) > SHOWN_TASKS:
                print(f"… and {len(tasks) - SHOWN_TASKS} more tasks: {self.store.folder / 'report.md'}")
        print(f"\n{self.store.folder}: results.json, report.md, episodes.jsonl (all that was said), trees.html")


class EvaluationProgress:
    """Progress: a line that is updated in place on a terminal, a new line every few seconds elsewhere."""

    SECONDS = 5.0

    def __init__(self, out: TextIO, total: int, *, quiet: bool = False) -> None:
        self._out, self._total, self._quiet = out, total, quiet
        self._terminal = out.isatty() and os.environ.get("TERM") != "dumb"
        self._printed = time.monotonic()

    def show(self, records: Any) -> None:
        """Show the progress, given all records."""
        now = time.monotonic()
        if self._quiet or now - self._printed < (0.1 if self._terminal else self.SECONDS):
            return
        self._printed = now
        ended = [record for record in records if record["error"] is None]
        errors = len(records) - len(ended)
        text = f"{len(ended)}/{self._total} episodes"
        if known := [record["success"] for record in ended if record["success"] is not None]:
            text += f", success {sum(known) / len(known):.0%}"
        text += f", {errors} with errors" if errors else ""
        text += f", {sum(record['tokens_in'] + record['tokens_out'] for record in records):,} tokens"
        print(f"\r\033[2K{text}" if self._terminal else text, end="" if self._terminal else "\n", file=self._out)
        self._out.flush()

    def clear(self) -> None:
        """Remove the line of progress."""
        if self._terminal and not self._quiet:
            print("\r\033[2K", end="", file=self._out, flush=True)

"""Episodes that a chat endpoint plays, as plain records, and the folder that they are kept in.

What this module promises:

1. An episode depends on the settings, its task and the number of its sample alone: not on the episodes played before,
   on how many are played at once, or on whether the run was interrupted. Where the endpoint is deterministic, so is it.
2. A record is in the file as a whole or not at all: one line, flushed to the disk. What a killed process or a full disk
   left of a line is cut off when the folder is opened again.
3. An episode counts once. One that ended is never played again; one with an error may be, and its new record replaces
   the old one.
4. One process at a time has a folder, and only with the settings that it was begun with, but for the endpoint's
   address: a server that is started again may have another one. All that were used are kept.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping
from io import FileIO
from pathlib import Path
from typing import Any, BinaryIO, Self

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from sandboxgym.adapters.chat import Aborted, ChatClient, ContextFull, EndpointError
from sandboxgym.adapters.prompts import Exchange, Prompt
from sandboxgym.cli import CommandError
from sandboxgym.cli.play import parse_action
from sandboxgym.cli.support.history import CannotGo
from sandboxgym.spaces import Unicode
from sandboxgym.system.atomic import write_atomic

FORMAT = "sandboxgym.evaluation/1"
Task = int | str
Record = dict[str, Any]
Key = tuple[Task, int]


def play(
    make: Callable[[], gym.Env[Any, Any]],
    env: gym.Env[Any, Any] | None,
    client: ChatClient,
    prompt: Prompt,
    key: Key,
    *,
    seed: int,
    limit: int,
    named: bool,
) -> tuple[gym.Env[Any, Any] | None, Record, BaseException | None]:
    """One episode, to its end or to an error.

    Args:
        make: makes an environment.
        env: one that is free, if there is any.
        client: the endpoint.
        prompt: what the model is told, and how its answers are read.
        key: (task, sample).
        seed: of the evaluation.
        limit: answers at most.
        named: whether ``reset`` takes the task by ``options``; otherwise a task is an episode that a seed begins.

    Returns:
        The environment (None if it failed), the record, and what the record's ``error`` came from.

    Raises:
        Aborted: the client was told to stop; nothing is known of the episode.
    """
    task, sample = key
    record: Record = {
        "task": task,
        "sample": sample,
        "kind": "",
        "error": None,
        "end": "",
        "success": None,
        "masked": False,
        "suspicious": False,
        "reward": 0.0,
        "tokens_in": 0,
        "tokens_out": 0,
        "uncounted": 0,
        "retries": 0,
        "first": "",
        "turns": [],
    }
    error: BaseException | None = None
    try:
        env = env or make()
        _episode(env, client, prompt, record, seed=seed, limit=limit, named=named)
    except Aborted:
        _close(env)
        raise
    except EndpointError as failed:
        error = failed
        record["retries"] += failed.attempts - 1
        record["error"] = {"where": "endpoint", "what": str(failed)}
    except (Exception, SystemExit) as failed:  # whatever an environment raises costs this episode, not the others
        error = failed
        text = " ".join(str(failed).split())
        record["error"] = {"where": "environment", "what": f"{type(failed).__name__}: {text}"[:500]}
        _close(env)
        env = None
    return env, record, error


def _episode(
    env: gym.Env[Any, Any],
    client: ChatClient,
    prompt: Prompt,
    record: Record,
    *,
    seed: int,
    limit: int,
    named: bool,
) -> None:
    code = task_code(record["task"])
    draws = (code, record["sample"]) if named else (code,)  # without tasks, what a seed begins is the task
    options = {"task": record["task"]} if named else None
    observation, info = env.reset(seed=_drawn(seed, 0, *draws), options=options)
    record["first"], record["kind"] = str(observation), str(info.get("task_type") or "")
    past: list[Exchange] = []
    for number in range(limit):
        messages = prompt.messages(past, observation, info)
        try:
            answer = client.complete(messages, seed=_drawn(seed, 1, code, record["sample"], number))
        except ContextFull:
            record["end"] = "context full"
            return
        text, complaint = prompt.hear(answer.content, info)
        action, complaint = _action(env.action_space, text, complaint)
        past.append(Exchange(str(observation), messages[-1]["content"], answer.content, text, complaint))
        reward, terminated, truncated, valid = 0.0, False, False, not complaint
        if action is not None:
            observation, given, terminated, truncated, info = env.step(action)
            reward, valid = float(given), valid and bool(info.get("valid_action", True))
            if not math.isfinite(reward):
                raise ValueError(f"expected a finite reward, found {reward}")
        record["turns"].append(
            {
                "shown": messages[-1]["content"],
                "answer": answer.content,
                "action": text,
                "valid": valid,
                "reward": reward,
                "observation": str(observation),
                "finish": answer.finish,
                "tokens_in": answer.tokens_in,
                "tokens_out": answer.tokens_out,
                "model": answer.model,
            }
        )
        record["reward"] += reward
        record["tokens_in"] += answer.tokens_in or 0
        record["tokens_out"] += answer.tokens_out or 0
        record["uncounted"] += answer.tokens_in is None or answer.tokens_out is None
        record["retries"] += answer.attempts - 1
        record["masked"], record["suspicious"] = bool(info.get("masked")), bool(info.get("suspicious"))
        if "success" in info:
            record["success"] = bool(info["success"]) and not record["masked"]
        if terminated or truncated:
            record["end"] = "terminated" if terminated else "truncated"
            return
    record["end"] = "truncated"


def _action(space: gym.Space[Any], text: str, complaint: str) -> tuple[Any, str]:
    """Action for ``step`` and complaint for the model; without an action (None) the model is asked again."""
    if isinstance(space, (Unicode, spaces.Text)):
        return (text, complaint) if not complaint or isinstance(space, Unicode) else (None, complaint)
    if complaint:
        return None, complaint
    try:
        return parse_action(space, text.strip()), ""
    except CannotGo as error:
        return None, f"Your action could not be read: {error}."


def _close(env: gym.Env[Any, Any] | None) -> None:
    if env is not None:
        try:
            env.close()
        except Exception:  # it has failed already, and the record says of what
            return


def task_code(task: Task) -> int:
    """A number for a task: itself, or one of its name."""
    return task if isinstance(task, int) else zlib.crc32(task.encode(errors="replace"))


def _drawn(*key: int) -> int:
    return int(np.random.SeedSequence(key).generate_state(1)[0] & 0x7FFFFFFF)


class Store:
    """The folder of one evaluation, held by this process until `close`.

    Files: ``settings.json``, ``episodes.jsonl`` (one record a line, in the order in which they ended), and what the
    report adds. ``records`` has the last record of every episode; ``spent`` those that were replaced, for their tokens.

    Args:
        folder: made if it is missing.
        settings: what the results depend on.
        may_change: names of settings that may differ from those it was begun with.

    Attributes:
        earlier: former values of those that changed, oldest first, by name.

    Raises:
        CommandError: another process has it, it holds something else, or an evaluation with other settings.
    """

    def __init__(self, folder: Path, settings: Mapping[str, Any], may_change: Collection[str] = ()) -> None:
        self.folder, self.records, self.spent = folder, dict[Key, Record](), list[Record]()
        self.earlier: dict[str, list[Any]] = {}
        self._may_change = may_change
        self._file: FileIO | None = None
        self._lock: BinaryIO | None = None
        try:
            self._begin(json.loads(json.dumps(settings)))
        except OSError as error:
            self.close()
            raise CommandError(f"{folder}: {error.strerror or error}") from error
        except BaseException:
            self.close()
            raise

    def _begin(self, settings: dict[str, Any]) -> None:
        about = self.folder / "settings.json"
        before: dict[str, Any] | None
        if self.folder.is_dir() and not about.exists():
            begun = ("lock", ".settings.json.")  # of a process that was killed before it had begun
            if not all(path.name.startswith(begun) for path in self.folder.iterdir()):
                raise CommandError(f"{self.folder} holds files that are not of an evaluation; choose another --out")
        self.folder.mkdir(parents=True, exist_ok=True)
        self._lock = _locked(self.folder)
        episodes = self.folder / "episodes.jsonl"
        if about.exists() and episodes.exists() and episodes.stat().st_size:
            before, self.earlier = _same(self.folder, about, settings, self._may_change)
        else:  # nothing was played, so that a mistyped address can be corrected
            before = None
        if before != settings:
            for name, value in (before or {}).items():
                if value != settings[name]:
                    self.earlier.setdefault(name, []).append(value)
            content = {"format": FORMAT, "settings": settings, "earlier": self.earlier}
            write_atomic(about, json.dumps(content, indent=1, ensure_ascii=False).encode(errors="replace"))
        self._file = open(episodes, "a+b", buffering=0)  # noqa: SIM115 (closed by close)
        for record in self._read():
            self._keep(record)

    def _read(self) -> Iterator[Record]:
        assert self._file is not None
        self._file.seek(0)
        content = self._file.read()
        whole = content.rfind(b"\n") + 1
        if whole < len(content):
            self._file.truncate(whole)
        for number, line in enumerate(content[:whole].splitlines(), 1):
            try:
                record = json.loads(line)
                record["task"], record["sample"], record["error"], record["turns"]
            except (ValueError, LookupError, TypeError) as error:
                raise CommandError(
                    f"{self.folder / 'episodes.jsonl'}: line {number} is damaged: {error!r}; without it, "
                    "its episode is played again"
                ) from error
            yield record

    def add(self, record: Record) -> None:
        """Keep a record, on the disk when this returns.

        Raises:
            CommandError: it cannot be written.
        """
        if self._file is None:
            raise CommandError(f"{self.folder} is closed")
        line = json.dumps(record, ensure_ascii=True, allow_nan=False).encode() + b"\n"
        end = self._file.seek(0, os.SEEK_END)
        try:
            while line:
                line = line[self._file.write(line) :]
            os.fsync(self._file.fileno())
        except OSError as error:
            with contextlib.suppress(OSError):
                self._file.truncate(end)  # else the next process that opens it does
            raise CommandError(f"{self.folder / 'episodes.jsonl'}: {error.strerror or error}") from error
        self._keep(record)

    def _keep(self, record: Record) -> None:
        key = (record["task"], record["sample"])
        before = self.records.get(key)
        if before is not None and before["error"] is None:
            return
        if before is not None:
            self.spent.append(before)
        self.records[key] = record

    def ended(self, key: Key) -> bool:
        """True if an episode was played to its end."""
        return key in self.records and self.records[key]["error"] is None

    def write(self, name: str, text: str) -> None:
        """Write a file of the report, atomically.

        Raises:
            CommandError: it cannot be written.
        """
        try:
            write_atomic(self.folder / name, text.encode(errors="replace"))
        except OSError as error:
            raise CommandError(f"{self.folder / name}: {error.strerror or error}") from error

    def close(self) -> None:
        """Release the folder. Idempotent."""
        for file in (self._file, self._lock):
            if file is not None:
                file.close()
        self._file = self._lock = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _locked(folder: Path) -> BinaryIO:
    """The folder's lock, until the file is closed or the process ends; children that it leaves do not hold it."""
    file = open(folder / "lock", "a+b")  # noqa: SIM115 (the lock lasts as long as the file is open)
    try:
        import fcntl
    except ImportError:  # not a POSIX system: nobody is kept out
        return file
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        file.close()
        raise CommandError(f"another process is evaluating into {folder}") from error
    return file


def _same(
    folder: Path, about: Path, settings: Mapping[str, Any], may_change: Collection[str]
) -> tuple[dict[str, Any], dict[str, list[Any]]]:
    """The settings that the folder was begun with and their former values; raises `CommandError` if others differ."""
    try:
        content = json.loads(about.read_bytes())
        found, kept = content["format"], dict(content["settings"])
        earlier = {str(name): list(values) for name, values in dict(content.get("earlier", {})).items()}
    except (ValueError, LookupError, TypeError) as error:
        raise CommandError(
            f"{about} does not hold the settings of an evaluation: {error!r}; choose another --out"
        ) from error
    if found != FORMAT:
        raise CommandError(f"{about}: expected the format {FORMAT!r}, found {found!r:.80}; choose another --out")
    names = sorted({*kept, *settings})
    differ = [name for name in names if kept.get(name) != settings.get(name) and name not in may_change]
    if differ:
        told = "; ".join(f"{name}: {kept.get(name)!r:.80}, now {settings.get(name)!r:.80}" for name in differ)
        raise CommandError(f"{folder} was begun with other settings ({told}); choose another --out to begin anew")
    return kept, earlier

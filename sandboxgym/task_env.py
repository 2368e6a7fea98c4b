"""The protocol of an environment with tasks, which prompts, rollout trees, adapters, trainer and commands rely on.

An environment derives from `TaskEnv` and provides four things, each of which has a default:

1. **Tasks as rows**: ``env.tasks(split)`` is a sequence of `Task`, and ``reset(options={"task": …})`` plays one of
   ``env.tasks()``, given by position or id.
2. **Info keys**: the ``info`` of ``reset`` and ``step`` has the names and types of `TaskInfo`.
3. **An expert**, for demonstrations: ``env.expert(rng=…, noise=…)`` makes an `Expert`.
4. **A card**, `EnvCard`: the system prompt, data sets, the extra to install. It is in a separate module without heavy
   imports, because commands read the cards of all environments.

Apart from the line that registers it, nothing else in this package refers to an environment by name.
"""

from __future__ import annotations

import operator
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol, SupportsIndex, TypedDict, overload, runtime_checkable

import gymnasium as gym

from sandboxgym.brief import brief
from sandboxgym.core import ActT, ObsT, SnapshotEnv
from sandboxgym.data import DataSet


class TaskNotFound(LookupError):
    """The environment has no task with the given position or id."""


class TaskInfo(TypedDict, total=False):
    """Keys of ``info`` that are read outside of the environment. All are optional; others may be added.

    A *privileged* key may reveal what an agent has to find out. Trainers may use it, because a baseline may depend on
    anything that the current action does not change; prompts never show it (`PRIVILEGED`).
    """

    task_id: str
    """Id of the current task, as in its row of ``env.tasks()``. For people, records and tests."""
    task_type: str
    """Type of the task, that of its row. Evaluation counts success by it."""
    instruction: str
    """Instruction of the task, as in its row. For interfaces that show it separately from the observation."""
    admissible_commands: list[str]
    """Actions that have an effect in this state. Prompts list them, look-ahead tries them, ``play`` numbers them,
    random agents (conformance, benchmarks) draw from them."""
    valid_action: bool
    """True if the last action was understood. Kept in trees, used by the trainer's ``invalid_penalty``, counted by
    evaluation. Default: true."""
    success: bool
    """True if the task is solved. Kept in trees, counted by evaluation, used to select demonstrations. If absent it is
    false in trees, and the demonstration is kept."""
    state_hash: str
    """Equal for equal states of the same task. GiGPO groups by it, look-ahead and ``play`` identify states by it."""
    progress_key: Any
    """Privileged. Progress in the task, for state baselines and schedules: text, a number, None, an enumeration member,
    or a tuple or frozen set of these; few different values per task."""
    features: tuple[float, ...]
    """Privileged. Numbers of the order of 1, the same number in every state, from which ``network`` learns state
    values; given only if the environment was asked for them."""
    lossy: list[str]
    """Descriptions of state that a snapshot taken now would not hold. The conformance suite compares them with the
    actual losses."""
    masked: bool
    """True if the end of the episode says nothing about the agent's work. The trainer excludes the episode, evaluation
    counts it as not solved."""
    verdict: str | None
    """Verdict on the work, or the reason why there is none: "infra failure" and "sandbox ended" are counted separately
    in the trainer's log. None or absent without a verdict."""
    suspicious: list[str]
    """Descriptions of signs that the verdict was forged. The trainer's log counts such episodes."""


PRIVILEGED = frozenset({"progress_key", "features"})
"""Keys of `TaskInfo` that no policy may see."""


class Task:
    """A row of ``env.tasks()``.

    Args:
        id: stable name, the same on every machine; ``info["task_id"]``.
        instruction: instruction in words, or a function that returns it when it is first read.
        type: ``info["task_type"]``; empty if the environment has no types of tasks.
    """

    __slots__ = ("_instruction", "id", "type")

    def __init__(self, id: str, instruction: str | Callable[[], str] = "", type: str = "") -> None:
        self.id = id
        self.type = type
        self._instruction = instruction

    @property
    def instruction(self) -> str:
        """Instruction in words; ``info["instruction"]`` if the environment gives it separately."""
        if not isinstance(self._instruction, str):
            self._instruction = self._instruction()
        return self._instruction

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Task) and (self.id, self.type) == (other.id, other.type)

    def __hash__(self) -> int:
        return hash((self.id, self.type))

    def __repr__(self) -> str:
        return f"Task({self.id!r}, type={self.type!r})"


class TaskRows(Sequence[Task]):
    """Lazy sequence of tasks: each row is made when it is read, so a million rows cost nothing.

    Args:
        count: number of tasks.
        row: makes the task at a position from 0 to ``count`` - 1.
    """

    def __init__(self, count: int, row: Callable[[int], Task]) -> None:
        self._count = count
        self._row = row

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, position: int) -> Task: ...
    @overload
    def __getitem__(self, position: slice) -> TaskRows: ...
    def __getitem__(self, position: int | slice) -> Task | TaskRows:
        if isinstance(position, slice):
            chosen = range(self._count)[position]
            return TaskRows(len(chosen), lambda number: self._row(chosen[number]))
        return self._row(range(self._count)[position])

    def __repr__(self) -> str:
        return f"<{self._count:,} tasks>"


@runtime_checkable
class Expert(Protocol):
    """A player for demonstrations; ``env.expert()`` makes one, which plays one episode after another."""

    noisy: bool
    """True if the last action was a deliberate mistake, which a learner should not imitate."""

    def reset(self, observation: Any) -> None:
        """Begin an episode: the environment has been reset."""

    def act(self, observation: Any) -> Any:
        """The next action."""


@dataclass(frozen=True)
class EnvCard:
    """Facts about an environment that are known before it is made, and without importing it.

    Hooks are names (``package.module:function``), imported when they are needed.
    """

    title: str = ""
    """Display name, under which ``sandboxgym doctor`` says whether it can run; empty: it is not listed there."""
    system_prompt: str = ""
    """System prompt, before the first observation: the situation and the form of actions."""
    data_sets: tuple[DataSet, ...] = ()
    """Data sets to use instead of embedded data, for ``sandboxgym download``, ``list``, ``info`` and ``doctor``."""
    caches: Mapping[str, str] = field(default_factory=dict)
    """Directories under `data.cache_dir`, with a description of each. ``sandboxgym gc --all`` deletes them."""
    extra: str = ""
    """Extra of this package to install; empty if none is needed."""
    module: str = ""
    """Module that can be imported once the extra is installed."""
    ready: str = ""
    """Short description of what can run if nothing is missing."""
    played_with: Mapping[str, Any] = field(default_factory=dict)
    """Arguments with which ``sandboxgym play`` makes it for a person, unless the command line has others."""
    sandboxed: bool = False
    """True if it needs a process sandbox that works on this machine."""
    step_seconds: float = 0.0
    """Seconds that a step may take by the environment's own limits, with its default arguments; 0: it only computes."""
    probes: str = ""
    """Hook: a tuple of functions, each of which returns a finding for ``sandboxgym doctor``."""
    images: str = ""
    """Hook: a function of the environment's arguments, those given, that returns the container images of its tasks, by
    name; empty if they need none."""
    clear_cache: str = ""
    """Hook: a function of ``dry_run`` that clears those caches whose entries processes may use, and returns a
    `run_directories.Leftover` per entry, with a ``note`` for those in use."""


class TaskEnv(SnapshotEnv[ObsT, ActT]):
    """A `SnapshotEnv` with tasks, for the trainer, prompts and commands.

    Authors implement `tasks`, call `chosen_task` in ``reset``, and may provide `expert` and `card`.
    """

    card: ClassVar[EnvCard] = EnvCard()

    def tasks(self, split: str | None = None) -> Sequence[Task]:
        """The tasks as rows; lazily if there are many (`TaskRows`).

        Args:
            split: None: the tasks of this environment, in the order of ``reset(options={"task": position})``. A name:
                those of another split of the same source; an environment made for that split can be reset to them.

        Raises:
            ValueError, LookupError, OSError: there is no such split, or its data is missing.
        """
        raise NotImplementedError(f"{type(self).__name__} must define tasks(split=None)")

    @property
    def num_tasks(self) -> int:
        """Number of tasks."""
        return len(self.tasks())

    def expert(self, *, rng: random.Random | None = None, noise: float = 0.0, **options: Any) -> Expert:
        """Make a player for demonstrations.

        Args:
            rng: random stream of its choices.
            noise: probability of a deliberate mistake in each action.
            options: further settings that depend on the environment (``expert_kwargs`` of the trainer).

        Raises:
            NotImplementedError: the environment has none; see `has_expert`.
        """
        raise NotImplementedError(f"{type(self).__name__} has no expert")

    def task_index(self, task: str | SupportsIndex) -> int:
        """Position in ``tasks()`` of a task, given by position or id.

        Raises:
            TaskNotFound: there is no such task.
            TypeError: ``task`` is neither text nor an integer.
        """
        rows = self.tasks()
        if isinstance(task, str):
            found = next((number for number, row in enumerate(rows) if row.id == task), None)
            if found is None:
                raise TaskNotFound(f"expected a task such as {rows[0].id!r}, found {brief(task, 80)}")
            return found
        number = operator.index(task)
        if not 0 <= number < len(rows):
            raise TaskNotFound(f"expected a task from 0 to {len(rows) - 1}, found {number}")
        return number

    def chosen_task(self, options: Mapping[str, Any] | None, also: str = "task") -> int:
        """Position of the task in ``reset``'s options; without one it is drawn from ``np_random``.

        Args:
            options: options of ``reset``.
            also: the environment's own name for ``"task"``; it takes precedence if both are given.

        Raises:
            TaskNotFound: see `task_index`.
            ValueError: an option is unknown.
        """
        options = options or {}
        names = (also,) if also == "task" else (also, "task")
        if unknown := options.keys() - set(names):
            raise ValueError(
                f"expected the options {' or '.join(map(repr, names))}, found {brief(sorted(unknown), 80)}"
            )
        wanted = next((options[name] for name in names if options.get(name) is not None), None)
        return int(self.np_random.integers(self.num_tasks)) if wanted is None else self.task_index(wanted)


def task_count(env: gym.Env[Any, Any]) -> int | None:
    """Number of tasks of an environment in any stack of wrappers; None if its ``reset`` takes no task."""
    count: int | None = getattr(env.unwrapped, "num_tasks", None)
    return count


def has_expert(env: gym.Env[Any, Any]) -> bool:
    """True if an environment, in any stack of wrappers, has a player for demonstrations."""
    given = getattr(env.unwrapped, "expert", None)
    return given is not None and getattr(given, "__func__", None) is not TaskEnv.expert

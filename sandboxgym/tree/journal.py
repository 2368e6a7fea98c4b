"""Journals of rollouts: a rollout whose process was ended continues in another process and gives the same trees.

1. Each result of an environment, of a reset or a step, is appended to a file as soon as it is complete. A record is
   named by the decisions that led to it, so it is never given to a path that decided otherwise.
2. In the next process the rollout begins anew, and results that the file has are taken from it; no environment does
   anything for them. Where a path needs one again, the environment is restored from the last durable snapshot on the
   path and repeats the actions since, or repeats all of them from the reset on.
3. The policy decides again, from the same streams of random numbers. A `RecallingPolicy` may be told what it had
   decided instead.
4. A last record that is not whole, because the process was killed while it wrote it, is ignored and removed.

Records are plain data (`sandboxgym.serialization`): reading them executes nothing.
"""

from __future__ import annotations

import hashlib
import logging
import os
import struct
import threading
import zlib
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from sandboxgym.errors import SnapshotCorrupt, SnapshotNotSupported
from sandboxgym.serialization import pack, unpack
from sandboxgym.tree.asynchronous import Asynchronous
from sandboxgym.tree.envs import guarded
from sandboxgym.tree.live import Acting, CapturedNode, LivePath, Reset
from sandboxgym.tree.lockstep import Driver, Lockstep
from sandboxgym.tree.nodes import Action, RolloutTree
from sandboxgym.tree.policies import Context, Policy
from sandboxgym.wrappers.jobs import Begun, EnvJob, EnvResult, Stepped, execute

logger = logging.getLogger("sandboxgym")

_FRAME = struct.Struct(">II")
"""Length and CRC-32 of a record."""
_HEAD = "head"

Reference = tuple[str, ...]
"""Name of a durable snapshot, as the source of environments gives and understands it."""


class JournalMismatch(ValueError):
    """The file is the journal of another rollout.

    Args:
        message: for people.
        found: head of the file; None if it has none.
    """

    def __init__(self, message: str, found: Any) -> None:
        super().__init__(message)
        self.found = found


@runtime_checkable
class DurableSource(Protocol):
    """Source of environments whose snapshots may have durable copies, which outlive its process."""

    def reference(self, snap: Any, /) -> Reference | None:
        """Name of a snapshot's durable copy, which may not be complete yet; None if it has none."""

    def durable(self, reference: Reference, /) -> Any:
        """The snapshot of a name, in this process or a later one.

        Raises:
            SnapshotMissing, SnapshotCorrupt: it is not there, or damaged.
        """


@runtime_checkable
class RecallingPolicy(Policy, Protocol):
    """Policy whose decisions can be kept in a journal."""

    def record(self, action: Action, /) -> Any:
        """A decision as plain data."""

    def recall(self, contexts: Sequence[Context], records: Sequence[Any], /) -> Sequence[Action | None]:
        """The decisions of these records, as if they had just been made for these contexts."""


class Journal:
    """Results of the environments of one rollout, in a file.

    Args:
        path: the file; its folder exists. If the file exists, the rollout continues.
        head: plain data that identifies the rollout: the same in every process that continues it.
        others: files of other processes, which rolled out parts of the same batch: records are read from them as well.
        recall: take decisions from the file, too, of a `RecallingPolicy`. Faster, as nothing is sampled twice; but a
            policy that computes with batches may round otherwise from there on.

    Raises:
        JournalMismatch: a file has another head, or is no journal.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        head: Any,
        others: Sequence[str | os.PathLike[str]] = (),
        recall: bool = False,
    ) -> None:
        self.path = Path(path)
        self.recalls = recall
        self.written = 0
        """Bytes appended by this process."""
        self._known: dict[bytes, bytes] = {}
        self._lock = threading.RLock()  # with ``overlap`` there are two threads
        head_record = pack([_HEAD, head])
        for other in others:
            self._read(Path(other), head_record)
        end = self._read(self.path, head_record)
        self._file: int | None = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666)
        os.ftruncate(self._file, end)
        os.lseek(self._file, end, os.SEEK_SET)
        self._new: list[bytes] = [] if end else [_framed(head_record)]
        self.found = len(self._known)
        """Number of records that were there."""
        self.flush()

    def get(self, *about: Any) -> Any:
        """The record that was noted about these values; None if there is none."""
        try:
            data = self._known.get(_name(about))
        except SnapshotNotSupported:  # so nothing was noted either
            return None
        return unpack(data) if data else None

    def note(self, *about: Any, value: Callable[[], Any]) -> None:
        """Append a record about some values, with the next `flush`, unless there is one.

        What is no plain data ends the journal, which is logged: the rollout goes on without.
        """
        if self._file is None:
            return
        try:
            name = _name(about)
            if name in self._known:
                return
            data = pack(value())
        except SnapshotNotSupported as error:
            self.stop(str(error))
            return
        with self._lock:
            self._known[name] = b""  # it is not read again
            self._new.append(_framed(name + data))

    def flush(self) -> None:
        """Write the records that were noted. A disk that fails ends the journal, not the rollout."""
        with self._lock:
            data, self._new = b"".join(self._new), []
            try:
                while data and self._file is not None:
                    count = os.write(self._file, data)
                    self.written += count
                    data = data[count:]
            except OSError as error:
                self.stop(str(error))

    def stop(self, reason: str) -> None:
        """Write no more, and say so in the log."""
        logger.warning("the rollout is not in the journal from here on (%s): %s", self.path, reason)
        self.close()

    def close(self) -> None:
        """Close the file, which stays. Idempotent."""
        with self._lock:  # not while another thread writes: the number of a closed file may be another file's
            if self._file is not None:
                os.close(self._file)
                self._file = None

    def _read(self, path: Path, head: bytes) -> int:
        """Read the records of a file; returns where they end."""
        try:
            content = path.read_bytes()
        except FileNotFoundError:
            return 0
        end = 0
        while (start := end + _FRAME.size) <= len(content):
            length, checksum = _FRAME.unpack_from(content, end)
            record = content[start : start + length]
            if len(record) != length or zlib.crc32(record) != checksum or length < (_NAME if end else 1):
                break  # zeros, which some file systems leave behind, are whole records of no bytes
            if not end and record != head:
                wanted, found = _head_of(head), _head_of(record)
                raise JournalMismatch(f"{path}: expected the journal of {wanted}, found one of {found}", found)
            if end:
                self._known[record[:_NAME]] = record[_NAME:]
            end = start + length
        if not end and not _may_be_torn(content):
            raise JournalMismatch(f"{path}: expected the journal of {_head_of(head)}, found no journal", None)
        return end


_NAME = 16
"""Bytes of a record's name."""


_BEGINNING = pack([_HEAD, None])[:-1]
"""First bytes of every head."""


def _may_be_torn(content: bytes) -> bool:
    """True if a file may be a journal whose head is not whole, or that a loss of power has filled with zeros."""
    length, beginning = content[: _FRAME.size], content[_FRAME.size :][: len(_BEGINNING)]
    return not any(length + beginning) or (not any(length[:1]) and _BEGINNING.startswith(beginning))


def _framed(record: bytes) -> bytes:
    return _FRAME.pack(len(record), zlib.crc32(record)) + record


def _head_of(record: bytes) -> Any:
    """Content of a head; None of other records."""
    try:
        match unpack(record):
            case [str(kind), head] if kind == _HEAD:
                return head
    except SnapshotCorrupt:
        pass
    return None


def _name(about: Sequence[Any]) -> bytes:
    return hashlib.blake2b(pack(list(about)), digest_size=_NAME).digest()


class _Gone:
    """Stand-in for a snapshot of the process that ended."""

    def __init__(self, reference: Reference | None) -> None:
        self.reference = reference
        self.snap: Any = None
        self.lock = threading.Lock()  # several paths may start there at once

    def release(self) -> None:
        """Release the snapshot, if it was found."""
        if self.snap is not None:
            self.snap.release()


class Journaling(Driver):
    """Rollouts with a `Journal`, whichever driver advances the paths.

    Args:
        journal: of this rollout.
        *given: of the driver.
        **options: of the driver.
    """

    policy: Any

    def __init__(self, journal: Journal, *given: Any, **options: Any) -> None:
        super().__init__(*given, **options)
        if self.look is not None:
            raise ValueError("expected no journal with look: what it returns may be no plain data")
        self.journal, self.replays = journal, True
        self.store = self.envs if isinstance(self.envs, DurableSource) else None
        self.recalling = self.policy if isinstance(self.policy, RecallingPolicy) else None

    # What is known.

    def known(self, asked: Reset | LivePath | Acting) -> EnvResult | None:
        """Result of a job from the journal; None if it is not there."""
        if not self.journal.found:  # a new journal: names take longer than some environments' steps
            return None
        if isinstance(asked, Reset):
            if (found := self.journal.get(*self.reset_of(asked))) is None:
                return None
            observation, info, reference = found
            return EnvResult(begun=(observation, info), snap=_Gone(reference))
        if isinstance(asked, LivePath):
            if (found := self.journal.get(*self.start_of(asked))) is None:
                return None
            asked.behind = True
            return EnvResult(begun=(found[0], found[1]))
        if (found := self.journal.get(*self.step_of(asked.run, asked.action))) is None:
            return None
        asked.run.behind = True
        *stepped, reference = found
        captures = asked.point is not None and asked.point.snap is None
        return EnvResult(stepped=tuple(stepped), snap=_Gone(reference) if captures else None)  # type: ignore[arg-type]

    def reset_of(self, reset: Reset) -> Sequence[Any]:
        """Values that the record of a reset is about."""
        return "reset", reset.index, reset.task, reset.seed

    def start_of(self, run: LivePath) -> Sequence[Any]:
        """Values that the record of a path's start is about."""
        return "start", run.tree.index, run.path.key, self.actions(run)

    def step_of(self, run: LivePath, action: Action) -> Sequence[Any]:
        """Values that the record of an action is about."""
        return "step", run.tree.index, run.path.key, self.actions(run), action.text

    def turn_of(self, run: LivePath) -> Sequence[Any]:
        """Values that the record of a decision is about."""
        return "turn", run.tree.index, run.path.key, self.actions(run)

    def actions(self, run: LivePath) -> list[Any]:
        """Actions from the root to a path's node."""
        return [edge.action.text for edge in run.path.from_root()]

    # Snapshots of the process that ended.

    def captured(self, point: CapturedNode) -> Any:
        """The snapshot of a captured state; None if it ended with its process and has no durable copy."""
        gone = point.snap
        if not isinstance(gone, _Gone):
            return gone
        with gone.lock:
            if gone.snap is None:
                if gone.reference is None or self.store is None:
                    return None
                gone.snap = self.store.durable(tuple(gone.reference))
            return gone.snap

    # What is noted.

    def planted(self, reset: Reset, begun: Begun, captured: float, roots: int) -> RolloutTree:
        """The tree of a task that was reset to; noted."""
        snap = reset.snap
        self.journal.note(*self.reset_of(reset), value=lambda: [*begun, self.reference(snap)])
        return super().planted(reset, begun, captured, roots)

    def append_step(self, run: LivePath, action: Action, result: Stepped) -> bool:
        """Append the result of a step to its path, and note it."""
        snap = run.anchors[-1].snap if run.anchors[-1].node is run.node else None
        self.journal.note(*self.step_of(run, action), value=lambda: [*result, self.reference(snap)])
        if (policy := self.recalling) is not None:
            stream = run.context.rng.bit_generator
            self.journal.note(*self.turn_of(run), value=lambda: [policy.record(action), stream.state])
        return super().append_step(run, action, result)

    def reference(self, snap: Any) -> list[str] | None:
        """Name of a snapshot's durable copy."""
        if isinstance(snap, _Gone):
            found = snap.reference
        else:
            found = None if snap is None or self.store is None else self.store.reference(snap)
        return None if found is None else list(found)


class Journaled(Journaling, Lockstep):
    """A rollout in lockstep with a `Journal`."""

    def run(self, tasks: Sequence[Any], indices: Sequence[int], max_live: int) -> list[RolloutTree]:
        """Run the rollout; the trees, in the order of the tasks."""
        try:
            return super().run(tasks, indices, max_live)
        finally:
            self.journal.flush()

    def execute(
        self, asked: Sequence[Reset | LivePath | Acting], jobs: Sequence[EnvJob]
    ) -> Sequence[EnvResult | Exception]:
        """Results of the environments' jobs, from the journal as far as it has them."""
        results: list[EnvResult | Exception | None] = [self.known(each) for each in asked]
        due = [at for at, result in enumerate(results) if result is None]
        led = [at for at in due if self.behind(asked[at])]
        direct = [at for at in due if at not in set(led)]
        for at, done in zip(direct, self.envs.execute_all([jobs[at] for at in direct]) if direct else []):
            results[at] = done
        if led:
            calls = [partial(guarded, partial(self.lead, asked[at])) for at in led]
            for at, found in zip(led, self.envs.call(calls), strict=True):
                results[at] = found
        for each, result in zip(asked, results, strict=True):
            if isinstance(each, LivePath) and isinstance(result, EnvResult) and result.begun is not None:
                begun = result.begun
                self.journal.note(*self.start_of(each), value=partial(list, begun))
        self.journal.flush()
        return [result for result in results if result is not None]

    def decide(self, runs: Sequence[LivePath]) -> Sequence[Action | None]:
        """The policy's decision for each path, or that which the journal has."""
        policy = self.recalling
        if policy is None or not self.journal.recalls:
            return super().decide(runs)
        actions: dict[int, Action | None] = {}
        records = [(run, self.journal.get(*self.turn_of(run))) for run in runs]
        if old := [(run, record) for run, record in records if record is not None]:
            for run, (_, stream) in old:
                run.context.rng.bit_generator.state = stream
            told = policy.recall([run.context for run, _ in old], [record for _, (record, _) in old])
            actions = {id(run): action for (run, _), action in zip(old, told, strict=True)}
        if new := [run for run, record in records if record is None]:
            actions |= {id(run): action for run, action in zip(new, super().decide(new), strict=True)}
        return [actions[id(run)] for run in runs]

    # Environments that are led to where their path is.

    def behind(self, asked: Reset | LivePath | Acting) -> bool:
        """True if a job needs an environment that is led to its state first."""
        if isinstance(asked, LivePath):
            return isinstance(asked.anchors[0].snap, _Gone)
        return isinstance(asked, Acting) and asked.run.behind

    def lead(self, asked: Reset | LivePath | Acting) -> EnvResult:
        """Lead a path's environment to its state, then execute the job."""
        if isinstance(asked, Acting):
            return self.replay_to(asked.run, asked.run.anchors[-1], lambda _: execute(asked.job()))
        assert isinstance(asked, LivePath)
        return self.replay_to(asked, asked.anchors[0], lambda begun: EnvResult(begun=begun))


class JournaledAsynchronous(Journaling, Asynchronous):
    """A rollout with a `Journal` whose paths advance by themselves."""

    async def run(self, tasks: Sequence[Any], indices: Sequence[int]) -> list[RolloutTree]:
        """Run the rollout; the trees, in the order of the tasks."""
        try:
            return await super().run(tasks, indices)
        finally:
            self.journal.flush()

    async def ask(self, asked: Reset | LivePath | Acting, job: Callable[[], Any], *, restoring: bool = False) -> Any:
        """Result of an environment's job, from the journal if it is there."""
        if (known := self.known(asked)) is not None:
            return known.begun if isinstance(asked, LivePath) else asked.note(known)
        if isinstance(asked, Acting) and asked.run.behind:
            job = partial(self.replay_to, asked.run, asked.run.anchors[-1], asked.step)
        found = await super().ask(asked, job, restoring=restoring)
        if isinstance(asked, LivePath) and not isinstance(found, Exception):
            self.journal.note(*self.start_of(asked), value=partial(list, found))
        self.journal.flush()
        return found

    def asked_policy(self, run: LivePath) -> Awaitable[Action | None]:
        """The policy's decision for a path, or that which the journal has."""
        policy = self.recalling
        found = self.journal.get(*self.turn_of(run)) if policy is not None and self.journal.recalls else None
        if policy is None or found is None:
            return super().asked_policy(run)
        record, run.context.rng.bit_generator.state = found
        (action,) = policy.recall([run.context], [record])
        return _known(action)


async def _known(action: Action | None) -> Action | None:
    """A decision that was made before."""
    return action

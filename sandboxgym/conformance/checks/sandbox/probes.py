"""Level 4: state that a shell sandbox keeps, loses and leaks, declared against measured."""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from sandboxgym.conformance.check import Budget, Failed, Inconclusive, Skipped, check
from sandboxgym.conformance.harness.scenario import Scene
from sandboxgym.conformance.sandbox_probes import declared_losses
from sandboxgym.conformance.sandbox_probes.shell import PROBES, Probe, parse, same, script, start, stop
from sandboxgym.conformance.subject import AnyEnv, Subject

WAIT = 1.0
"""Seconds between the snapshot and its restore, for the clocks to differ."""

KEPT, LOST, LEAKED, DISTURBED, ABSENT = "kept", "lost", "leaked", "disturbed", "n/a"

Readings = dict[str, str]


@dataclass
class Row:
    """One line of the matrix of probes."""

    probe: Probe
    declared: bool
    places: dict[str, str] = field(default_factory=dict)
    """Kept or lost, by place of reading: restored, in a fork, in another environment."""
    leaks: list[str] = field(default_factory=list)
    detail: str = ""

    @property
    def measured(self) -> str:
        """The worst of the observed results."""
        if self.leaks:
            return LEAKED
        found = set(self.places.values())
        return next((state for state in (DISTURBED, LOST, KEPT) if state in found), ABSENT)

    @property
    def wrong(self) -> bool:
        """True if the contract is broken: the state leaks, or is declared kept and lost."""
        return self.measured in (LEAKED, DISTURBED) or (self.declared and self.measured == LOST)

    def to_json(self) -> dict[str, Any]:
        """The row as JSON values, for the evidence."""
        row: dict[str, Any] = {"probe": self.probe.name, "declared": self.declared, "measured": self.measured}
        row |= self.places
        if self.leaks:
            row["leaks"] = self.leaks
        if self.detail:
            row["seen"] = self.detail
        return row


@dataclass
class Session:
    """The environments of one measurement, and the commands typed into them."""

    subject: Subject
    scene: Scene
    token: str
    opened: list[AnyEnv] = field(default_factory=list)

    def type(self, env: AnyEnv, command: str) -> str:
        """Run a command in the sandbox."""
        assert self.subject.shell is not None
        self.scene.note(f"shell({self.scene.name(env)}, {command!r})")
        return self.subject.shell(env, command)

    def change(self, env: AnyEnv, probes: Iterable[Probe], value: Any) -> None:
        """Prepare the probes (value ``"prepare"``), or change them to a value."""
        output = self.type(env, script(probes, value, self.token))
        if "done" not in output:
            raise Inconclusive(f"the sandbox's shell did not get through the script ({value}): {output[-200:]!r}")

    def read(self, env: AnyEnv, probes: Iterable[Probe]) -> Readings:
        """Read all the probes."""
        return parse(self.type(env, script(probes, "read", self.token)))


@check(
    "probes.matrix",
    level=4,
    after=("api.protocol",),
    hazard="Hidden state of the sandbox (file modes, links, deleted files, /dev/shm, variables, processes) differs "
    "after a restore or shows in a sibling, and the agent acts on what is not there.",
    blind="What no probe looks at: mounted volumes, network peers, packages installed system-wide, the kernel's state. "
    "Without Subject.shell, everything.",
)
def matrix(subject: Subject, budget: Budget, rng: np.random.Generator) -> dict[str, Any]:
    """Changes each piece of hidden state by a shell command before a snapshot, and again after it, and reads it back.
    It is read in forks, in the parent and a sibling after a fork changed it and was closed, after a restore, and in
    another environment. Fails if state leaks, is disturbed by the snapshot, or is lost although declared kept; other
    losses are listed in the evidence.
    """
    if subject.shell is None:
        raise Skipped("no shell hook: give Subject.shell to probe a sandbox with shell commands")
    token = secrets.token_hex(6)
    with Scene(subject) as scene:
        session = Session(subject, scene, token)
        try:
            rows = measure(session)
        finally:
            for env in session.opened:
                with contextlib.suppress(Exception):
                    session.type(env, stop(token))
        if all(row.measured == ABSENT for row in rows):
            raise Inconclusive("no probe showed its change: does Subject.shell run POSIX shell, several lines at once?")
        evidence = _evidence(rows)
        wrong = [row for row in rows if row.wrong]
        if wrong:
            raise Failed(_message(wrong), evidence, _script(scene))
    return evidence


@check(
    "probes.losses",
    level=4,
    after=("api.protocol",),
    hazard="State that a snapshot cannot hold (a traced process, a connection to the outside) is silently lost or "
    "shared in the copies, or the attempt to capture it breaks the sandbox.",
    blind="What the sandbox does not let the probes set up (listed in the evidence with the reason); GPU contexts; "
    "further losses of a snapshot that declares one. Without Subject.shell, everything.",
)
def losses(subject: Subject, budget: Budget, rng: np.random.Generator) -> dict[str, Any]:
    """Sets up state that is hard to capture, one kind at a time, and takes a snapshot.
    Kinds are io_uring, a traced child, nested namespaces, another user's process, one that outlived its shell, and a
    TCP connection, unix socket and FIFO to a peer outside. Fails unless the snapshot is refused with an exception type
    of the sandbox's own, or declares the loss (``info["lossy"]`` of the restore, Subject.lossy, or ``processes`` =
    False in ``snapshot_spec``), or keeps the state, if all of it is inside; and unless the sandbox continues as before.
    """
    if subject.shell is None:
        raise Skipped("no shell hook: give Subject.shell to probe a sandbox with shell commands")
    with Scene(subject) as scene:
        outcomes = declared_losses.measure(subject, scene)
        evidence = {
            "set up": sum(outcome.measured != declared_losses.SKIPPED for outcome in outcomes),
            "matrix": [outcome.to_json() for outcome in outcomes],
        }
        wrong = [outcome for outcome in outcomes if outcome.measured in declared_losses.WRONG]
        if wrong:
            message = "; ".join(f"{one.measured}: {one.snag.kind} ({one.detail})" for one in wrong)
            raise Failed(message, evidence, _script(scene))
        if not evidence["set up"]:
            raise Skipped(f"nothing could be set up, such as {outcomes[0].snag.kind}: {outcomes[0].detail}")
    return evidence


def _script(scene: Scene) -> str:
    hook = ["", "def shell(env, command):", "    ...  # the hook that was given to the suite", ""]
    scene.lines[:0] = hook
    return scene.script()


def _message(wrong: list[Row]) -> str:
    parts = []
    for state, words in ((LEAKED, "leaks"), (DISTURBED, "disturbed by a snapshot"), (LOST, "declared and lost")):
        names = [row.probe.name for row in wrong if row.measured == state]
        if names:
            parts.append(f"{words}: {', '.join(names)}")
    return "; ".join(parts)


def _evidence(rows: list[Row]) -> dict[str, Any]:
    def names(state: str) -> list[str]:
        return [row.probe.name for row in rows if row.measured == state]

    return {
        "kept": len(names(KEPT)),
        "lost and not declared": [row.probe.name for row in rows if row.measured == LOST and not row.declared],
        "leaked": names(LEAKED),
        "not applicable": names(ABSENT),
        "matrix": [row.to_json() for row in rows],
    }


def _declared(subject: Subject, probe: Probe) -> bool:
    if probe.need is None or probe.name in subject.capabilities.loses:
        return False
    return True if probe.need == "state" else bool(getattr(subject.capabilities, probe.need))


def measure(session: Session, chosen: Sequence[Probe] = PROBES) -> list[Row]:
    """Measure all pieces of hidden state, in environments made for this; return a row for each probe."""
    subject, scene = session.subject, session.scene
    env = scene.make()
    scene.reset(env, seed=1, options=subject.options(0))
    session.opened.append(env)
    rows = {probe.name: Row(probe, _declared(subject, probe)) for probe in chosen}
    session.type(env, start())
    session.change(env, chosen, "prepare")
    below = scene.snapshot(env)  # what is deleted next is in a layer of its own
    pristine = session.read(env, chosen)
    session.change(env, chosen, "one")
    before = session.read(env, chosen)
    probes = [probe for probe in chosen if _applies(probe, pristine, before)]
    snap = scene.snapshot(env)
    taken = time.monotonic()
    after_snapshot = session.read(env, probes)
    for probe in probes:
        if not probe.changes and not same(probe, before[probe.name], after_snapshot.get(probe.name, ""), 1e9):
            rows[probe.name].places["after the snapshot"] = DISTURBED
            rows[probe.name].detail = _seen(before, after_snapshot, probe)
    _siblings(session, rows, probes, env)
    session.change(env, chosen, "two")
    changed = session.read(env, probes)
    time.sleep(WAIT)
    scene.restore(env, snap)
    elapsed = time.monotonic() - taken
    restored = session.read(env, probes)
    for probe in probes:
        expected = after_snapshot if probe.changes else before
        if probe.mutate and not probe.changes and changed.get(probe.name) == before[probe.name]:
            continue  # the second change does not show, so a change that was undone would look like one that was kept
        _place(rows[probe.name], "restored", expected, restored, elapsed)
    _elsewhere(session, rows, probes, snap, before, after_snapshot, taken)
    scene.drop(below)
    return list(rows.values())


def _applies(probe: Probe, pristine: Readings, before: Readings) -> bool:
    """True if the change shows at all in an untouched environment."""
    shown = before.get(probe.name, "")
    if probe.name == "shell.random":  # bash and the like, and one shell for all commands
        drawn, _, expected = shown.partition("|")
        return bool(expected) and drawn == expected
    if probe.name.startswith("process.") and before.get("process.background") != "alive, advancing":
        return False
    if probe.name == "process.later":
        return shown == "none"
    if not probe.mutate and not probe.changes and not probe.name.startswith("clock."):
        return bool(shown) and shown == pristine.get(probe.name)  # else it is another one at every command
    return bool(shown) and shown != pristine.get(probe.name)


def _place(row: Row, where: str, expected: Readings, found: Readings, elapsed: float) -> None:
    name = row.probe.name
    kept = same(row.probe, expected.get(name, ""), found.get(name, ""), elapsed)
    row.places[where] = KEPT if kept else LOST
    if not kept and not row.detail:
        row.detail = _seen(expected, found, row.probe)


def _seen(expected: Readings, found: Readings, probe: Probe) -> str:
    name = probe.name
    return f"expected {expected.get(name, '')[:60]!r}, found {found.get(name, '')[:60]!r}"


def _elsewhere(
    session: Session,
    rows: dict[str, Row],
    probes: list[Probe],
    snap: Any,
    before: Readings,
    after_snapshot: Readings,
    taken: float,
) -> None:
    """Restore in an environment of its own."""
    scene = session.scene
    other = scene.make()
    scene.reset(other, seed=2, options=session.subject.options(0))
    scene.restore(other, snap)
    session.opened.append(other)
    found = session.read(other, probes)
    for probe in probes:
        row = rows[probe.name]
        if "restored" in row.places:
            expected = after_snapshot if probe.changes else before
            _place(row, "in another environment", expected, found, time.monotonic() - taken)


def _siblings(session: Session, rows: dict[str, Row], probes: list[Probe], parent: AnyEnv) -> None:
    """Fork; change everything in one fork, close it, and read in the parent and the other one."""
    scene = session.scene
    changing, watching = scene.fork(parent, 2)
    session.opened += [changing, watching]
    own = session.read(parent, probes)
    theirs = {"a fork": session.read(changing, probes), "the other fork": session.read(watching, probes)}
    for probe in probes:
        row = rows[probe.name]
        if probe.name.startswith("clock."):
            continue
        for found in theirs.values():
            if row.places.get("in a fork") != LOST:
                _place(row, "in a fork", own, found, 0.0)
    views = (("the parent", parent, own), ("a sibling", watching, theirs["the other fork"]))
    session.change(changing, PROBES, "two")

    def look(when: str) -> None:
        for who, env, expected in views:
            found = session.read(env, probes)
            for probe in probes:
                if not probe.shared or not expected.get(probe.name):
                    continue
                if found.get(probe.name, "") != expected[probe.name]:
                    row = rows[probe.name]
                    row.leaks.append(f"{who} sees it {when}")
                    row.detail = _seen(expected, found, probe)

    look("when a fork changes it")
    seen = {name: len(row.leaks) for name, row in rows.items()}
    session.type(changing, stop(session.token))
    session.opened.remove(changing)
    scene.close(changing)
    look("when a fork is closed")
    session.type(watching, stop(session.token))
    session.opened.remove(watching)
    scene.close(watching)
    for name, row in rows.items():  # the same leak twice is one
        if seen[name]:
            row.leaks = row.leaks[: seen[name]]

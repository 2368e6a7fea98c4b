"""Sampling by engines on servers: the backend ``vllm``.

What this module promises:

1. A row is a list of token ids that only ever grows; what an engine caches of it is the engine's affair. Rows that
   share a prefix go to one engine, whose prefix cache then has it, until that engine has far more rows than the others.
2. A turn's seed comes from the row's own stream, so the turn does not depend on the batch, the engine or a repetition
   (up to the rounding of kernels, which may depend on the batch).
3. Only answers of the session's weights are used (`engine.checked`). An engine with other weights (one that was started
   again, say) is given them anew, verified and asked again.
4. Every request has a deadline and is repeated a limited number of times, by the next engine where there are several;
   then `engine.EngineError` says what happened.

Log-probabilities of the engine are `Generation.sampler_logps`; those that are learned from, and entropies, are measured
by the trainer's own forward pass: of each turn with ``score``, otherwise of whole trees (`rescore`).
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch

from bpo_ref.sampling.engine import (
    Answer,
    BadAnswer,
    Engine,
    EngineError,
    EngineUnavailable,
    Expected,
    OtherWeights,
    Sent,
    TurnRequest,
    checked,
)
from bpo_ref.sampling.generate import (
    CausalLM,
    ContextOverflow,
    Generation,
    StaleSession,
    evaluating,
    score,
    weights_version,
)
from sandboxgym.system.once import file_lock

logger = logging.getLogger("sandboxgym")
Result = TypeVar("Result")

MOST_REQUESTS = 256
"""Requests of a process that wait for an answer at the same time."""
LOAD_FACTOR = 10.0
"""Loading weights may take this many times as long as an answer."""
LONGEST_PAUSE = 60.0
"""Seconds between two repetitions of a request, at most."""

Verify = Callable[[Engine], None]
"""Check that an engine has the weights, or raise `EngineError`."""


class Fleet:
    """Engines that serve the same weights.

    Args:
        engines: at least one.
        vocabulary: number of token ids of the model.
        seconds: deadline of an answer.
        retries: repetitions of a request.
        pause: seconds before the first repetition; each further pause is twice as long.
    """

    def __init__(
        self, engines: Sequence[Engine], *, vocabulary: int, seconds: float, retries: int, pause: float = 1.0
    ) -> None:
        if not engines:
            raise ValueError("expected at least one engine, found none")
        self.engines = list(engines)
        self.vocabulary = vocabulary
        self.seconds, self.retries, self.pause = seconds, retries, pause
        self.version: str | None = None
        """Version of the weights that are served; None: unknown ones."""
        self.adapter = False
        """True if they are an adapter, on top of the weights that the engines were started with."""
        self._folder = ""
        self._sent: Sent | None = None
        self._verify_again: Verify = lambda engine: None
        self._reviving = [threading.Lock() for _ in engines]
        self._warned: set[str] = set()

    def check(self, expected: Expected) -> None:
        """Compare every engine with what the run needs; see `Engine.check`.

        Raises:
            EngineError: an engine differs, or does not answer.
        """
        self._on_each([partial(engine.check, expected, seconds=self.seconds) for engine in self.engines])

    def serve(
        self,
        folder: str,
        version: str,
        verify: Verify,
        *,
        again: Verify | None = None,
        load: bool = True,
        adapter: bool = False,
        sent: Sent | None = None,
    ) -> None:
        """Make all engines serve the weights in a folder.

        Args:
            folder: as the engines see it; it has to stay until the next call.
            version: name of these weights, never used before.
            verify: called for each engine.
            again: called for one that gets the weights again later, from any thread. Default: ``verify``.
            load: False if another process has done it.
            adapter: the folder holds a LoRA adapter, not whole weights.
            sent: weights that are sent over NCCL; the folder holds none then.

        Raises:
            EngineError: an engine did not load them, or does not pass the check.
        """
        self.version, self.adapter, self._folder, self._verify_again = None, adapter, folder, again or verify
        self._sent = sent
        self._warned.clear()
        if load:
            self._on_each([partial(self._load, engine, version, verify) for engine in self.engines])
        self.version = version

    def sleep(self) -> None:
        """Have all engines free the memory of their GPUs, once nothing is asked of them any more."""
        self._on_each([partial(engine.sleep, seconds=self.seconds) for engine in self.engines])

    def wake(self) -> None:
        """Have all engines take up again what they had before `sleep`."""
        self._on_each([partial(engine.wake, seconds=self.seconds) for engine in self.engines])

    def ask(self, requests: Sequence[TurnRequest], *, places: Sequence[int]) -> list[Answer]:
        """Get the answers to requests, all at the same time.

        Each is asked of the engine at its place or, where that fails, of the next ones.

        Raises:
            EngineError: a request got no answer, however often it was repeated.
        """
        asked = [partial(self._ask, request, place) for request, place in zip(requests, places, strict=True)]
        return at_once(asked, most=MOST_REQUESTS)

    async def answer(self, request: TurnRequest, *, place: int) -> Answer:
        """Get the answer to one request, beside others; see `ask`. A call that is cancelled gives it up."""
        return await in_thread(partial(self._ask, request, place))

    def _ask(self, request: TurnRequest, place: int, stop: threading.Event) -> Answer:
        """Get the answer to one request."""
        turn = place

        def once() -> Answer:
            nonlocal turn
            i, turn = turn % len(self.engines), turn + 1
            engine = self.engines[i]
            mine = replace(request, key=uuid.uuid4().hex)  # a late answer to an earlier attempt is not this one's
            try:
                answer = engine.generate(mine, seconds=self.seconds)
                return checked(answer, mine, engine=engine.name, vocabulary=self.vocabulary)
            except OtherWeights:
                self._revive(i, request.version)
                turn = i  # which has them now
                raise

        return self._repeated(once, stop)

    def _on_each(self, actions: Sequence[Callable[[], None]]) -> None:
        """Run an action for each engine, with repetitions."""
        at_once([partial(self._repeated, action) for action in actions], most=len(actions))

    def _repeated(self, action: Callable[[], Result], stop: threading.Event) -> Result:
        """Run an action until it succeeds, as often as allowed."""
        pause, left = self.pause, self.retries
        while True:
            try:
                return action()
            except (EngineUnavailable, BadAnswer) as error:
                if not left or stop.is_set():
                    raise EngineError(f"{error}; asked {self.retries + 1 - left} times") from error
                self._warn(f"asking again, after pauses of {self.pause:g} s and more: {error}")
            stop.wait(pause)
            pause, left = min(LONGEST_PAUSE, 2 * pause), left - 1

    def _warn(self, text: str) -> None:
        """Log a warning, once for the same weights: hundreds of threads may meet the same trouble."""
        if text not in self._warned:
            self._warned.add(text)
            logger.warning("%s", text)

    def _load(self, engine: Engine, version: str, verify: Verify) -> None:
        seconds = LOAD_FACTOR * self.seconds
        if self._sent is not None:
            engine.receive(self._sent, version, seconds=seconds)
        else:
            load = engine.load_adapter if self.adapter else engine.load
            load(self._folder, version, seconds=seconds)
        verify(engine)

    def _revive(self, i: int, version: str) -> None:
        """Give an engine the weights again, once for all threads and processes that have found it without them."""
        if version != self.version:
            raise StaleSession(f"weights {version} are asked for, and {self.version} are served; open a new session")
        lock = self._reviving[i]
        if not lock.acquire(blocking=False):
            with lock:  # another thread does it
                return
        try:
            engine, waited = self.engines[i], threading.Event()
            self._warn(f"{engine.name} has other weights: loading this run's again")

            def wait() -> None:
                logger.info("another process loads the weights of %s", engine.name)
                waited.set()

            with ExitStack() as stack:
                try:  # as other processes of the run do, which see the folder, too
                    stack.enter_context(file_lock(Path(self._folder) / f"engine-{i}.lock", waiting=wait))
                except OSError as error:  # no locks there
                    logger.info("other processes may load the weights of %s, too: %s", engine.name, error)
                if waited.is_set() and engine.version(seconds=self.seconds) == version:
                    self._verify_again(engine)
                else:
                    self._load(engine, version, self._verify_again)
        finally:
            lock.release()


def at_once(actions: Sequence[Callable[[threading.Event], Result]], *, most: int) -> list[Result]:
    """Run actions in threads and return their results, in order; the first error is raised at once.

    Nobody waits for the others then, which may have minutes until their deadline: they are told by the event that each
    action gets, and cannot keep the process from ending.
    """
    stop = threading.Event()
    waiting: queue.SimpleQueue[int] = queue.SimpleQueue()
    done: queue.SimpleQueue[tuple[int, Result | None, BaseException | None]] = queue.SimpleQueue()
    for i in range(len(actions)):
        waiting.put(i)

    def work() -> None:
        while not stop.is_set():
            try:
                i = waiting.get_nowait()
            except queue.Empty:
                return
            try:
                done.put((i, actions[i](stop), None))
            except BaseException as error:  # raised by the caller, which waits for an answer of each
                stop.set()
                done.put((i, None, error))

    threads = [threading.Thread(target=work, daemon=True) for _ in range(min(most, len(actions)))]
    found: dict[int, Result] = {}
    try:
        for thread in threads:
            thread.start()
        while len(found) < len(actions):
            i, result, error = done.get()
            if error is not None:
                raise error
            found[i] = result  # type: ignore[assignment]
    finally:
        stop.set()
    for thread in threads:
        thread.join()
    return [found[i] for i in range(len(actions))]


async def in_thread(action: Callable[[threading.Event], Result]) -> Result:
    """Run an action in a thread. If this is cancelled it is told so, and nobody waits for it, as in `at_once`."""
    stop: threading.Event = threading.Event()
    done: Future[Result] = Future()
    done.set_running_or_notify_cancel()  # from here on it cannot be cancelled, only not be waited for

    def work() -> None:
        try:
            done.set_result(action(stop))
        except BaseException as error:  # raised by the caller
            done.set_exception(error)

    threading.Thread(target=work, name="sandboxgym-turn", daemon=True).start()
    try:
        return await asyncio.wrap_future(done)
    finally:
        stop.set()


class ServedBackend:
    """Backend of engines that already serve the weights of a model.

    Args:
        fleet: the engines.
        model: the same weights in this process.
        stop_ids: tokens that end a turn.
        max_new_tokens: largest number of tokens per turn.
        temperature: temperature of the sampling.
        context_limit: largest number of tokens per row.
        score: measure log-probabilities and entropies of each turn here, for schedules that decide by them.
        pinned: the engines' weights stay while the model's may change, and nothing is measured here.

    Raises:
        ValueError: the temperature is not positive, or a pinned backend is to measure turns.
    """

    def __init__(
        self,
        fleet: Fleet,
        model: CausalLM,
        *,
        stop_ids: Sequence[int],
        max_new_tokens: int,
        temperature: float,
        context_limit: int,
        score: bool = False,
        pinned: bool = False,
    ) -> None:
        if temperature <= 0:
            raise ValueError(f"temperature must be positive, got {temperature}; for greedy turns pass no rngs")
        if score and pinned:
            raise ValueError("turns of pinned weights cannot be measured by a model whose weights change")
        self.fleet = fleet
        self.model = model
        self.stop_ids = tuple(sorted(stop_ids))
        self.max_new_tokens = max_new_tokens
        self.temperature = temperature
        self.context_limit = context_limit
        self.score = score
        self.pinned = pinned

    def open(self, contexts: Sequence[Sequence[int]] = ()) -> ServedSession:
        """Open a session whose rows 0, 1, ... begin with ``contexts``."""
        session = ServedSession(self)
        for context in contexts:
            session.add(context)
        return session


class ServedSession:
    """Conversations continued turn by turn by engines, with the weights at the time of `ServedBackend.open`."""

    def __init__(self, backend: ServedBackend) -> None:
        if backend.fleet.version is None:
            raise StaleSession("the engines have no weights of this run yet")
        self._backend = backend
        self._version = backend.fleet.version
        self._weights = weights_version(backend.model)
        self._rows: dict[int, list[int]] = {}
        self._places: dict[int, int] = {}
        self._begun: list[tuple[list[int], int]] = []
        """First contexts of rows, and the places of their engines."""
        self._opened = 0
        self._turns = asyncio.Semaphore(MOST_REQUESTS)
        self.prefilled: int | None = None
        """Number of context tokens that were read, without those from prefix caches; None: engines do not tell."""
        self.reused: int | None = None
        """Number of context tokens from prefix caches; None: engines do not tell."""

    def add(self, context: Sequence[int]) -> int:
        """Add a row that begins with ``context``; returns its number."""
        ids = list(context)
        if not ids:
            raise ValueError("a row needs at least one token to begin with")
        place = next((place for begun, place in self._begun if ids[: len(begun)] == begun), None)
        if place is None:
            place = self._least()
            self._begun.append((ids, place))
        return self._insert(ids, place)

    def fork(self, row: int, *, length: int | None = None) -> int:
        """Fork a row: a new one that begins with the first ``length`` tokens of ``row`` (default: all)."""
        ids = self._rows[row][:length]
        if not ids:
            raise ValueError("a row needs at least one token to begin with")
        return self._insert(ids, self._places[row])

    def extend(self, row: int, ids: Sequence[int]) -> None:
        """Append tokens of the environment to a row."""
        self._rows[row].extend(ids)

    def drop(self, rows: Sequence[int]) -> None:
        """Forget finished rows."""
        for row in rows:
            del self._rows[row], self._places[row]
        if not self._rows:
            self._begun.clear()

    def context(self, row: int) -> list[int]:
        """Exact ids of a row so far."""
        return list(self._rows[row])

    def room(self, row: int) -> int:
        """Number of tokens that still fit into a row's context."""
        return self._backend.context_limit - len(self._rows[row])

    def prefill(self, rows: Sequence[int]) -> None:
        """Do nothing: the engines' caches find prefixes by themselves."""

    def generate(self, rows: Sequence[int], rngs: Sequence[np.random.Generator] | None = None) -> list[Generation]:
        """Sample one turn of each row, with a seed from the row's own of ``rngs``; without ``rngs`` greedily.

        After an error no row has changed.

        Raises:
            ContextOverflow: a row has no room left.
            StaleSession: the weights have changed since the session was opened.
            EngineError: a request got no usable answer, however often it was repeated.
        """
        requests = self._requests(rows, rngs)
        answers = self._backend.fleet.ask(requests, places=[self._places[row] for row in rows])
        return self._taken(rows, answers)

    async def turn(self, row: int, rng: np.random.Generator) -> Generation:
        """Sample one turn of a row, as `generate` does, while others are sampled: no row waits for another one.

        Raises like `generate`. After an error or a cancellation the row is as it was.
        """
        async with self._turns:
            (request,) = self._requests([row], [rng])
            answer = await self._backend.fleet.answer(request, place=self._places[row])
        (generation,) = self._taken([row], [answer])
        return generation

    def _requests(self, rows: Sequence[int], rngs: Sequence[np.random.Generator] | None) -> list[TurnRequest]:
        """Requests for the next turns of rows, after all checks."""
        backend = self._backend
        moved = not backend.pinned and weights_version(backend.model) != self._weights
        if moved or backend.fleet.version != self._version:
            raise StaleSession("the weights changed after this session was opened; open a new one")
        if full := [row for row in rows if self.room(row) < 1]:
            raise ContextOverflow(f"rows {full} have reached the limit of {backend.context_limit} tokens")
        seeds = [0] * len(rows) if rngs is None else [int(rng.integers(2**31)) for rng in rngs]
        return [self._request(row, seed, greedy=rngs is None) for row, seed in zip(rows, seeds, strict=True)]

    def _taken(self, rows: Sequence[int], answers: Sequence[Answer]) -> list[Generation]:
        """Turns of the answers, appended to their rows."""
        for row, answer in zip(rows, answers, strict=True):
            if answer.cached is not None:
                self.prefilled = (self.prefilled or 0) + len(self._rows[row]) - answer.cached
                self.reused = (self.reused or 0) + answer.cached
            self._rows[row].extend(answer.ids)
        return self._measured(rows, answers)

    def _measured(self, rows: Sequence[int], answers: Sequence[Answer]) -> list[Generation]:
        """Turns of the answers, with log-probabilities and entropies if these are wanted at once."""
        backend, turns = self._backend, []
        logps = entropies = None
        if backend.score and rows:
            with torch.inference_mode(), evaluating(backend.model):
                contexts = [self._rows[row] for row in rows]
                logps, entropies = score(backend.model, contexts, temperature=backend.temperature)
        for i, (row, answer) in enumerate(zip(rows, answers)):
            end = len(self._rows[row]) - 1
            span = slice(end - len(answer.ids), end)
            known = [[] if found is None else found[i, span].tolist() for found in (logps, entropies)]
            truncated = answer.ids[-1] not in backend.stop_ids
            turns.append(Generation(answer.ids, known[0], known[1], truncated, answer.logps))
        return turns

    def _request(self, row: int, seed: int, *, greedy: bool) -> TurnRequest:
        backend = self._backend
        return TurnRequest(
            ids=self.context(row),
            version=self._version,
            stop_ids=backend.stop_ids,
            limit=min(backend.max_new_tokens, self.room(row)),
            temperature=0.0 if greedy else backend.temperature,
            seed=seed,
            adapter=backend.fleet.adapter,
        )

    def _insert(self, ids: list[int], place: int) -> int:
        """Add a row at an engine, unless that one has more than its share of rows."""
        counts = self._counts()
        if counts[place] > 1.5 * len(self._rows) / len(counts) + 8:
            place = self._least()
        self._rows[self._opened], self._places[self._opened] = ids, place
        self._opened += 1
        return self._opened - 1

    def _counts(self) -> list[int]:
        counts = [0] * len(self._backend.fleet.engines)
        for place in self._places.values():
            counts[place] += 1
        return counts

    def _least(self) -> int:
        """Place of the engine with the fewest rows."""
        counts = self._counts()
        return counts.index(min(counts))

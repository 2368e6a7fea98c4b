"""A typed client of OpenEnv servers, with snapshots, restores and forks where `sandboxgym serve openenv` is the server.

Needs ``pip install "sandboxgym[openenv]"``, but not the package ``openenv``::

    with Client("http://127.0.0.1:8000") as env:
        env.reset(task=0, seed=0)
        env.step("look")
        before = env.snapshot()
        left, right = env.fork(2)  # sessions of their own
        left.step("go to desk 1")
        env.restore(before)

1. Calls block until the answer is there, and raise `ServerError` with the server's code and words where there is none.
2. A client is one session. It ends with `Client.close`, with the connection, or after the server's time without calls.
3. After a call that took too long, or a broken connection, the client is closed: no answer belongs to another call.
"""

from __future__ import annotations

import contextlib
import json
import urllib.parse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from sandboxgym.brief import brief

_SCHEMES = {"http": "ws", "https": "wss", "ws": "ws", "wss": "wss"}


class ServerError(RuntimeError):
    """The server refused a call, or could not be reached.

    Attributes:
        code: the protocol's, such as ``EXECUTION_ERROR``; ``CONNECTION`` if there was no answer.
    """

    def __init__(self, code: str, message: str) -> None:
        super().__init__(f"{code}: {message}")
        self.code = code


@dataclass(frozen=True)
class Result:
    """The answer to `Client.reset`, `Client.step` and `Client.restore`, with Gymnasium's words."""

    observation: Any
    """The observation as its space has it in JSON: text, numbers, lists, objects. From other servers of
    OpenEnv: all fields of their observation."""
    reward: float | None
    """None after a reset."""
    done: bool
    terminated: bool
    truncated: bool
    info: Mapping[str, Any]


class Client:
    """One session of an OpenEnv server.

    Args:
        url: base URL of the server, and of the environment if it serves several (``http://host:8000/ALFWorld-v0``).
        session: id of an existing session without a client, such as another program's fork.
        timeout: seconds to wait for an answer.
        headers: sent when connecting, for a server behind a gateway.

    Raises:
        ServerError: there is no such server, session, or no room.
        ImportError: the package ``websockets`` is missing.
    """

    def __init__(
        self,
        url: str,
        *,
        session: str | None = None,
        timeout: float = 60.0,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        from websockets.exceptions import WebSocketException
        from websockets.sync.client import connect

        parts = urllib.parse.urlsplit(url)
        if parts.scheme not in _SCHEMES or not parts.netloc:
            raise ValueError(f"expected a URL such as http://127.0.0.1:8000, found {brief(url, 80)}")
        query = "" if session is None else urllib.parse.urlencode({"session_id": session})
        target = parts._replace(scheme=_SCHEMES[parts.scheme], path=parts.path.rstrip("/") + "/ws", query=query)
        self.url, self.timeout, self._headers = url, timeout, dict(headers or {})
        try:
            connecting = connect(
                target.geturl(),
                open_timeout=timeout,
                close_timeout=5,
                max_size=2**27,
                additional_headers=self._headers,
                proxy=None if parts.hostname in ("localhost", "127.0.0.1", "::1") else True,
            )
            self._connection = contextlib.ExitStack()
            self._socket = self._connection.enter_context(connecting)
        except (OSError, WebSocketException, TimeoutError) as error:
            raise ServerError("CONNECTION", f"cannot connect to {target.geturl()}: {error}") from error

    def reset(
        self,
        *,
        seed: int | None = None,
        task: int | str | None = None,
        episode_id: str | None = None,
        options: Mapping[str, Any] | None = None,
        **more: Any,
    ) -> Result:
        """Begin an episode.

        Args:
            seed: of all its randomness.
            task: position or id of a task; by default the environment draws one.
            episode_id: shown in `state`.
            options: the environment's own options of ``reset``.
            more: further fields, for other servers of OpenEnv.
        """
        given = {"seed": seed, "task": task, "episode_id": episode_id, "options": options, **more}
        return _result(self._ask("reset", {key: value for key, value in given.items() if value is not None}))

    def step(self, action: Any) -> Result:
        """Take a step; ``action`` is a member of the action space as JSON has it."""
        return self.send({"action": action})

    def send(self, action: Mapping[str, Any]) -> Result:
        """Take a step with the fields of the server's own action schema, for other servers of OpenEnv."""
        return _result(self._ask("step", dict(action)))

    def state(self) -> dict[str, Any]:
        """``episode_id``, ``step_count``, ``session_id``, ``snapshots`` and more."""
        return dict(self._ask("state", None))

    def snapshot(self, name: str | None = None) -> str:
        """Keep the present state on the server; returns its name, by default the next of s1, s2, …"""
        return str(self._ask("snapshot", {} if name is None else {"name": name})["snapshot"])

    def restore(self, snapshot: str, *, seed: int | None = None) -> Result:
        """Put this session back into a kept state; with a seed, with a new random future."""
        given = {"snapshot": snapshot} if seed is None else {"snapshot": snapshot, "seed": seed}
        return _result(self._ask("restore", given))

    def fork(self, k: int, *, snapshot: str | None = None, seed: int | None = None) -> list[Client]:
        """Clients of ``k`` new sessions at the present state, or at that of a snapshot.

        Args:
            k: number of sessions. All are made, or none.
            snapshot: name of a snapshot of this session.
            seed: None clones the random streams; a seed gives each session its own.
        """
        given = {"count": k, "snapshot": snapshot, "seed": seed}
        ids = self._ask("fork", {key: value for key, value in given.items() if value is not None})["sessions"]
        with contextlib.ExitStack() as stack:
            made = [
                stack.enter_context(Client(self.url, session=one, timeout=self.timeout, headers=self._headers))
                for one in ids
            ]
            stack.pop_all()
        return made

    def discard(self, snapshots: Sequence[str]) -> None:
        """Release snapshots of this session."""
        self._ask("discard", {"snapshots": list(snapshots)})

    def close(self) -> None:
        """End the session, on the server as well. Idempotent."""
        from websockets.exceptions import WebSocketException

        with contextlib.suppress(OSError, WebSocketException):
            self._socket.send('{"type": "close"}')
        self._connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _ask(self, kind: str, data: Mapping[str, Any] | None) -> Any:
        from websockets.exceptions import ConnectionClosed

        message = json.dumps({"type": kind} if data is None else {"type": kind, "data": data})
        try:
            with contextlib.suppress(ConnectionClosed):  # what the server said before it closed is still to be read
                self._socket.send(message)
            text = self._socket.recv(timeout=self.timeout)
        except TimeoutError:
            self._connection.close()
            raise ServerError("CONNECTION", f"expected an answer in {self.timeout:g} seconds, found none") from None
        except (ConnectionClosed, OSError) as error:
            raise ServerError("CONNECTION", f"the connection ended: {error}") from error
        try:
            answer = json.loads(text)
            found, data = answer["type"], answer.get("data")
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            self._connection.close()
            raise ServerError("CONNECTION", f"expected an answer of OpenEnv, found {brief(text, 80)}") from None
        if found == "error":
            said = data if isinstance(data, dict) else {}
            raise ServerError(str(said.get("code", "UNKNOWN")), _words(said))
        return data


def _words(said: Mapping[str, Any]) -> str:
    """Message of an error, with the details that other servers add."""
    details = f": {brief(said['errors'], 300)}" if said.get("errors") else ""
    return f"{said.get('message', 'no message')}{details}"


def _result(data: Mapping[str, Any]) -> Result:
    fields = data.get("observation", {})
    ours = isinstance(fields, dict) and {"observation", "terminated", "truncated", "info"} <= set(fields)
    done = bool(data.get("done", False))
    return Result(
        observation=fields["observation"] if ours else fields,
        reward=data.get("reward"),
        done=done,
        terminated=bool(fields["terminated"]) if ours else done,
        truncated=bool(fields["truncated"]) if ours else False,
        info=fields["info"] if ours else data.get("metadata") or {},
    )

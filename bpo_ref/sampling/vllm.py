"""The client of a vLLM server, over vLLM's own API for reinforcement learning.

Written against vLLM 0.32 and tested with it (the CPU build): ``/inference/v1/generate`` takes and gives token ids and
tells the version of the weights of every token; ``/pause``, ``/collective_rpc`` with ``reload_weights``,
``/update_weight_version`` and ``/resume`` change the weights; for adapters ``/v1/load_lora_adapter`` replaces
``reload_weights``. `SERVE` is the command that starts such a server, `SERVE_ADAPTERS` that of one for adapters.

What this module promises: every call has a deadline for all of it, also for answers that come byte by byte; what comes
is untrusted until read. vLLM's defaults do not matter: each request sets every filter of tokens, and ends turns by the
run's own tokens alone.
"""

from __future__ import annotations

import http.client
import json
import math
import re
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

from bpo_ref.sampling.engine import (
    Answer,
    BadAnswer,
    EngineError,
    EngineUnavailable,
    Expected,
    OtherWeights,
    Sent,
    Span,
    TurnRequest,
    WrongEngine,
)

OLDEST = (0, 32)
"""First version of vLLM that tells the version of the weights of every token."""
SERVE = (
    "VLLM_SERVER_DEV_MODE=1 vllm serve FOLDER --enable-scale-out --enable-prefix-caching "
    "--enable-prompt-tokens-details --logprobs-mode processed_logprobs"
)
"""Command that starts a server; FOLDER is what ``python -m bpo_ref.sampling.weights MODEL FOLDER`` writes."""
SERVE_ADAPTERS = "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 " + SERVE + " --enable-lora --max-lora-rank RANK"
"""Command that starts a server for adapters; RANK is ``lora_r``, or the next larger of 8, 16, 32, 64, 128, 256."""
DEVELOPER = "VLLM_SERVER_DEV_MODE=1"
"""Setting without which a server does not let its weights be changed."""
RUNTIME_ADAPTERS = "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1"
"""Setting without which a server does not load adapters."""
TRANSFER = """--weight-transfer-config '{"backend": "nccl"}'"""
"""Option without which a server takes no weights over NCCL."""
NCCL_DEVICES = ("cuda",)
"""Kinds of devices between which NCCL sends."""
LOADING = "loading"
"""Version of weights that are being loaded: no run asks for it."""
LATE = 10.0
"""Seconds in which a server has to take up its work again, where nothing is left of a deadline."""
MOST_BYTES = 2**26
"""Length of the longest answer that is read."""
EVERYTHING = {
    "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0,
    "frequency_penalty": 0.0, "min_tokens": 0, "n": 1, "ignore_eos": True, "detokenize": False, "logprobs": 0,
}  # fmt: skip
"""Sampling from the whole distribution, whatever the model's ``generation_config.json`` says."""


class VllmEngine:
    """A vLLM server.

    Args:
        url: its address, such as ``http://node7:8000``, or ``unix:///path`` of a socket on this machine.

    Raises:
        ValueError: it is not an address.
    """

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        here = parts.scheme == "unix" and not parts.hostname and parts.path.startswith("/")
        there = parts.scheme in ("http", "https") and parts.hostname
        if not (here or there) or parts.query or parts.fragment:
            raise ValueError(f"expected an address such as http://host:8000, found {url!r}")
        _ = parts.port  # raises ValueError where it is not a port
        self.name = url.rstrip("/")
        self._parts = parts
        self._model: str | None = None
        self._adapters: set[str] = set()
        """Versions of adapters that it was given."""

    def check(self, expected: Expected, *, seconds: float) -> None:
        """Compare version, context length, tokenizer and the kind of log-probabilities; see `Engine.check`."""
        end = time.monotonic() + seconds
        vllm = _part(self._call("GET", "/version", None, end), "version", str, self.name)
        numbers = re.match(r"(\d+)\.(\d+)", vllm)  # a build of one's own may have none
        if numbers and tuple(map(int, numbers.groups())) < OLDEST:
            raise WrongEngine(f"{self.name}: expected vLLM {'.'.join(map(str, OLDEST))} or newer, found {vllm}")
        served = self._served(end)
        length = served.get("max_model_len")
        if not isinstance(length, int) or length < expected.context:
            raise WrongEngine(f"{self.name}: expected a context of at least {expected.context} tokens, found {length}")
        if self._call("GET", "/weight_info", None, end, missing=DEVELOPER) is None:
            raise BadAnswer(f"{self.name}: expected the version of its weights, found nothing")
        asked = {"model": served["id"], "prompt": expected.text, "add_special_tokens": False}
        tokens = _part(self._call("POST", "/tokenize", asked, end), "tokens", list, self.name)
        if tokens != expected.tokens:
            text = f"{expected.text[:40]!r}"
            raise WrongEngine(
                f"{self.name}: it has another tokenizer: expected {expected.tokens} for {text}, found {tokens}"
            )
        tempered = any(temperature != 1.0 for temperature in expected.temperatures)
        if not (tempered or expected.rank or expected.sleeps or expected.nccl):
            return
        found = self._call("GET", "/server_info?config_format=json", None, end, missing=DEVELOPER)
        config = _part(found, "vllm_config", dict, self.name)
        model = _part(config, "model_config", dict, self.name)
        if expected.nccl:
            backend = (config.get("weight_transfer_config") or {"backend": "none"}).get("backend")
            device = str(_part(config, "device_config", dict, self.name).get("device")).partition(":")[0]
            if device not in NCCL_DEVICES:
                raise WrongEngine(f"{self.name}: expected a server on GPUs, for weights over NCCL, found {device}")
            if backend != "nccl":
                raise WrongEngine(
                    f"{self.name}: expected a server that takes weights over NCCL (start it with {TRANSFER}), "
                    f"found the backend {backend}"
                )
        if expected.sleeps and not model.get("enable_sleep_mode"):
            raise WrongEngine(f"{self.name}: expected a server that can sleep (start it with --enable-sleep-mode)")
        mode = model.get("logprobs_mode")
        if tempered and mode != "processed_logprobs":
            raise WrongEngine(
                f"{self.name}: expected log-probabilities of the tempered distribution (start it with "
                f"--logprobs-mode processed_logprobs), found {mode}"
            )
        lora = config.get("lora_config") or {"max_lora_rank": 0}  # null, where it takes no adapters
        rank = _part(lora, "max_lora_rank", int, self.name)
        if rank < expected.rank:
            raise WrongEngine(
                f"{self.name}: expected adapters of rank {expected.rank} (start it with {RUNTIME_ADAPTERS}, "
                f"--enable-lora and --max-lora-rank), found {f'rank {rank} at most' if rank else 'none'}"
            )

    def health(self, *, seconds: float) -> None:
        """Ask whether it is up.

        Raises:
            EngineError: it is not, or not yet.
        """
        self._call("GET", "/health", None, time.monotonic() + seconds, plain=True)

    def generate(self, request: TurnRequest, *, seconds: float) -> Answer:
        """Sample a turn; see `Engine.generate`."""
        end = time.monotonic() + seconds
        sampling = EVERYTHING | {
            "max_tokens": request.limit,
            "temperature": request.temperature,
            "seed": request.seed,
            "stop_token_ids": list(request.stop_ids),
        }
        body = {
            "model": request.version if request.adapter else self._model or self._served(end)["id"],
            "request_id": request.key,
            "token_ids": request.ids,
            "sampling_params": sampling,
            "cache_salt": request.version,
        }
        try:
            found = self._call("POST", "/inference/v1/generate", body, end, missing="--enable-scale-out")
        except _UnknownModel as error:
            if not request.adapter:
                raise
            raise OtherWeights(
                f"{self.name}: has no adapter {request.version}: it was started again ({error})"
            ) from error
        choices = _part(found, "choices", list, self.name)
        if len(choices) != 1:
            raise BadAnswer(f"{self.name}: expected one turn for one request, found {len(choices)}")
        (choice,) = choices
        try:
            places = choice["logprobs"]["content"]
            ids = [_whole(token) for token in choice["token_ids"]]
            if [place["token_id"] for place in places] != ids:
                raise BadAnswer(f"{self.name}: expected log-probabilities of the tokens {ids}, found those of others")
            spans = [
                Span(str(span["version"]), _whole(span["start"]), _whole(span["end"]))
                for span in choice["weight_versions"]
            ]
            details = (found.get("usage") or {}).get("prompt_tokens_details") or {}
            cached = details.get("cached_tokens")
            return Answer(
                key=str(found["request_id"]).rpartition("generate-tokens-")[2],
                ids=ids,
                logps=[_number(place["logprob"]) for place in places],
                spans=spans,
                cached=None if cached is None else _whole(cached),
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise BadAnswer(
                f"{self.name}: expected token ids with log-probabilities and weight_versions (vLLM 0.32 or newer), "
                f"found {str(choice)[:200]} ({type(error).__name__}: {error})"
            ) from error

    def version(self, *, seconds: float) -> str:
        """Version of the weights, ``""`` where it is none of a run; see `Engine.version`."""
        found = self._call("GET", "/weight_info", None, time.monotonic() + seconds, missing=DEVELOPER)
        told = found.get("weight_version") if isinstance(found, dict) else None
        return told if isinstance(told, str) else ""

    def load(self, folder: str, version: str, *, seconds: float) -> None:
        """Pause, load, name the version, resume; see `Engine.load`."""

        def change(end: float) -> None:
            reload = {"method": "reload_weights", "kwargs": {"weights_path": folder}}
            self._call("POST", "/collective_rpc", reload, end, missing=DEVELOPER)

        self._change(version, change, seconds)

    def load_adapter(self, folder: str, version: str, /, *, seconds: float) -> None:
        """Pause, replace the adapter, name the version, resume; see `Engine.load_adapter`.

        The version is the adapter's name, so that none but this one answers, and also that of the weights, so that
        tokens show it if somebody has changed those below.
        """

        def change(end: float) -> None:
            for name in {model["id"] for model in self._listed(end)} & {*self._adapters, version}:
                self._call("POST", "/v1/unload_lora_adapter", {"lora_name": name}, end, plain=True)
            loaded = {"lora_name": version, "lora_path": folder}
            self._call("POST", "/v1/load_lora_adapter", loaded, end, missing=RUNTIME_ADAPTERS, plain=True)
            self._adapters = {version}

        self._change(version, change, seconds)

    def receive(self, sent: Sent, version: str, /, *, seconds: float) -> None:
        """Pause, get weights over NCCL, name the version, resume; see `Engine.receive`."""

        def change(end: float) -> None:
            from bpo_ref.sampling import nccl  # which needs PyTorch, as settings do not

            found = self._call("GET", "/get_world_size", None, end, missing=DEVELOPER)
            workers = _part(found, "world_size", int, self.name)

            def call(path: str, body: Any) -> Any:
                return self._call("POST", path, body, end, missing=DEVELOPER)

            nccl.send(call, sent.weights, workers=workers, device=sent.device, end=end, name=self.name)

        self._change(version, change, seconds)

    def sleep(self, *, seconds: float) -> None:
        """Move the weights to the CPU and discard the caches; see `Engine.sleep`."""
        self._call("POST", "/sleep?level=1", None, time.monotonic() + seconds, missing=DEVELOPER)

    def wake(self, *, seconds: float) -> None:
        """Move the weights back; see `Engine.wake`."""
        end = time.monotonic() + seconds
        if _part(self._call("GET", "/is_sleeping", None, end, missing=DEVELOPER), "is_sleeping", bool, self.name):
            self._call("POST", "/wake_up", None, end)

    def _change(self, version: str, change: Callable[[float], None], seconds: float) -> None:
        """Change the weights while nothing is sampled, by a function of the deadline, and name their version."""
        end = time.monotonic() + seconds
        try:
            self._call("POST", "/pause?mode=wait", None, end, missing=DEVELOPER)
            # If loading fails, the weights may be half changed: they must not bear the name of the old ones.
            self._call("POST", "/update_weight_version", {"new_version": LOADING}, end, missing=DEVELOPER)
            change(end)
            self._call("POST", "/update_weight_version", {"new_version": version}, end)
        except BaseException:
            with suppress(EngineError):  # a pause whose answer was lost is one, too; what is raised says more
                self._call("POST", "/resume", None, max(end, time.monotonic() + LATE))
            raise
        self._call("POST", "/resume", None, max(end, time.monotonic() + LATE))

    def _connection(self, seconds: float) -> tuple[http.client.HTTPConnection, str]:
        """A connection that is not open yet, and what paths begin with."""
        if self._parts.scheme == "unix":
            return _UnixConnection(self._parts.path, timeout=seconds), ""
        kind = http.client.HTTPSConnection if self._parts.scheme == "https" else http.client.HTTPConnection
        return kind(self._parts.hostname or "", self._parts.port, timeout=seconds), self._parts.path.rstrip("/")

    def _served(self, end: float) -> dict[str, Any]:
        """The model that is served; adapters are listed after it."""
        found = self._listed(end)[0]
        self._model = found["id"]
        return found

    def _listed(self, end: float) -> list[dict[str, Any]]:
        """The model that is served, and its adapters."""
        listed = _part(self._call("GET", "/v1/models", None, end), "data", list, self.name)
        models = [model for model in listed if isinstance(model, dict) and isinstance(model.get("id"), str)]
        if not models:
            raise BadAnswer(f"{self.name}: expected the name of the model it serves, found {str(listed)[:200]}")
        return models

    def _call(
        self, method: str, path: str, body: Any, end: float, *, missing: str | None = None, plain: bool = False
    ) -> Any:
        """Ask the server; returns what its JSON says.

        Args:
            method: of HTTP.
            path: with its query.
            body: sent as JSON; None: nothing.
            end: deadline, of the monotonic clock.
            missing: what a server without this path was not started with.
            plain: the answer is a sentence for people and is not read.

        Raises:
            EngineUnavailable: no answer in time, or a server error.
            BadAnswer: it is not JSON.
            WrongEngine: the server refuses the request.
        """
        began = time.monotonic()
        connection, prefix = self._connection(max(0.01, end - began))
        try:
            data = None if body is None else json.dumps(body)
            headers = {} if data is None else {"Content-Type": "application/json"}
            connection.request(method, prefix + path, data, headers)
            connected = connection.sock  # which the connection forgets where the answer ends it
            response = connection.getresponse()
            text = _read(response, connected, end)
        except (OSError, http.client.HTTPException) as error:
            if isinstance(error, TimeoutError):
                raise EngineUnavailable(f"{self.name}: no answer to {path} within {end - began:.3g} s") from error
            reason = f"{type(error).__name__}: {error}"
            raise EngineUnavailable(f"{self.name}: cannot be reached for {path} ({reason})") from error
        finally:
            connection.close()
        told = text[:300].decode(errors="replace")
        if response.status == 404 and "does not exist" in told:
            raise _UnknownModel(f"{self.name}: refuses {path} with status 404: {told}")
        if response.status == 404 and missing is not None:
            raise WrongEngine(f"{self.name}: does not know {path}: start it with {missing}")
        if response.status >= 500 or response.status in (408, 429):
            raise EngineUnavailable(f"{self.name}: {path} failed with status {response.status}: {told}")
        if response.status != 200:
            raise WrongEngine(f"{self.name}: refuses {path} with status {response.status}: {told}")
        try:
            return json.loads(text) if text and not plain else None
        except (ValueError, RecursionError) as error:
            raise BadAnswer(f"{self.name}: expected JSON from {path}, found {told!r}") from error


class _UnixConnection(http.client.HTTPConnection):
    """HTTP over a Unix socket."""

    def __init__(self, path: str, *, timeout: float) -> None:
        super().__init__("localhost", timeout=timeout)
        self._path = path

    def connect(self) -> None:
        """Connect to the socket."""
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


class _UnknownModel(WrongEngine):
    """The server does not know a model, or adapter, of that name."""


def _read(response: http.client.HTTPResponse, connected: socket.socket, end: float) -> bytes:
    """Read an answer to its end, within the deadline."""
    parts, size = [], 0
    while True:
        left = end - time.monotonic()
        if left <= 0:
            raise TimeoutError
        connected.settimeout(left)
        part = response.read1(2**16)
        if not part:
            break
        parts.append(part)
        size += len(part)
        if size > MOST_BYTES:
            raise http.client.HTTPException(f"more than {MOST_BYTES} bytes")
    if response.length:
        raise http.client.IncompleteRead(b"", response.length)
    return b"".join(parts)


def _part(found: Any, name: str, kind: type, engine: str) -> Any:
    """A part of an answer, of the kind that it must be."""
    part = found.get(name) if isinstance(found, dict) else None
    if not isinstance(part, kind) or (kind is int and isinstance(part, bool)):
        raise BadAnswer(f"{engine}: expected an answer with {name}, found {str(found)[:200]}")
    return part


def _whole(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"expected a whole number, found {value!r}")
    return value


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"expected a number, found {value!r}")
    try:
        return float(value)
    except OverflowError:  # of an integer of hundreds of digits
        return math.inf

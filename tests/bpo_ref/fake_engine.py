"""A server in this process that speaks vLLM's API over HTTP, around a small model, and can go wrong in every way."""

from __future__ import annotations

import copy
import json
import math
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

Alter = Callable[[dict[str, Any]], None]


@dataclass
class Fault:
    """Fault of a request for a turn: each part is left out by default."""

    latency: float = 0.0
    status: int = 200
    body: bytes | None = None
    drop: bool = False
    """End the connection without an answer."""
    cut: bool = False
    """End it in the middle of the answer."""
    twice: bool = False
    """Send the answer two times, one after the other."""
    trickle: bool = False
    """Send a byte from time to time."""
    alter: Alter | None = None
    """Change the answer."""


def choice(answer: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = answer["choices"][0]
    return found


def place(answer: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = choice(answer)["logprobs"]["content"][0]
    return found


@dataclass
class FakeServer:
    """A server with a copy of a model; weights that it is told to load are read from files."""

    model: Any
    tokenizer: Any = None
    context: int = 256
    vllm: Any = "0.32.0"
    logprobs_mode: str = "processed_logprobs"
    missing: tuple[str, ...] = ()
    """Paths that it does not know."""
    fault: Callable[[int], Fault] = lambda number: Fault()
    """Fault of the n-th request for a turn, from 0."""
    keeps: Callable[[str], bool] = lambda name: False
    """Weights that it silently does not load."""
    load_fault: Callable[[int], bool] = lambda number: False
    """True for the n-th loading of weights if it fails."""
    sleeps: bool = False
    """True if it can sleep."""
    slept: int = 0
    rank: int = 0
    """Largest rank of adapters; 0: it takes none."""
    port: int = 0
    socket: str = ""
    """Path of a Unix socket on which it listens, instead of a port."""
    requests: list[dict[str, Any]] = field(default_factory=list)
    loads: int = 0

    def __post_init__(self) -> None:
        self.lock = threading.Lock()
        self.start()

    def start(self) -> None:
        """Begin as a server that was just started: with the initial weights, of no run's version."""
        self.weights = copy.deepcopy(self.model).eval()
        if self.weights.config.tie_word_embeddings:  # as a server that was started from an untied copy
            head = self.weights.get_output_embeddings()
            head.weight = torch.nn.Parameter(head.weight.detach().clone())
        self.adapters: dict[str, Any] = {}
        """Models with the adapters of these names."""
        self.version, self.paused, self.asleep, self.turns = "default", False, False, 0
        self.changed = threading.Condition()
        self.closing = threading.Event()
        self.http = _UnixHttp(self.socket, _Handler) if self.socket else _Http(("127.0.0.1", self.port), _Handler)
        self.http.daemon_threads = False
        self.http.fake = self  # type: ignore[attr-defined]
        if not self.socket:
            self.port = self.http.server_address[1]
        self.thread = threading.Thread(target=self.http.serve_forever, args=(0.01,))
        self.thread.start()

    def stop(self) -> None:
        """End at once: connections are closed without an answer."""
        self.closing.set()
        self.http.shutdown()
        self.http.server_close()
        self.thread.join()

    def __enter__(self) -> FakeServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def answer(self, path: str, body: Any) -> Any:
        """The answer to anything but a request for a turn."""
        if path == "/v1/models":
            return {
                "data": [{"id": "policy", "max_model_len": self.context}, *({"id": name} for name in self.adapters)]
            }
        if path == "/health":
            return {}
        if path == "/version":
            return {"version": self.vllm}
        if path == "/weight_info":
            return {"weight_version": self.version}
        if path == "/tokenize":
            return {"tokens": self.tokenizer(body["prompt"], add_special_tokens=False)["input_ids"]}
        if path == "/server_info":
            lora = {"max_lora_rank": self.rank} if self.rank else None
            model = {"logprobs_mode": self.logprobs_mode, "enable_sleep_mode": self.sleeps}
            return {"vllm_config": {"model_config": model, "lora_config": lora}}
        if path == "/is_sleeping":
            return {"is_sleeping": self.asleep}
        if path in ("/sleep", "/wake_up"):
            assert self.sleeps and not self.turns
            self.asleep = path == "/sleep"
            self.slept += self.asleep
            return {}
        if path in ("/pause", "/resume"):
            with self.changed:
                self.paused = path == "/pause"
                self.changed.notify_all()
                self.changed.wait_for(lambda: not (self.paused and self.turns))  # mode=wait
            return {"status": "paused"}
        if path == "/update_weight_version":
            self.version = body["new_version"]
            return {"success": True}
        if path == "/collective_rpc" and body["method"] == "reload_weights":
            assert self.paused
            self.load(Path(body["kwargs"]["weights_path"]))
            return {"results": [None]}
        if path == "/v1/load_lora_adapter":
            assert self.paused and body["lora_name"] not in self.adapters
            self.adapters[body["lora_name"]] = self.adapted(Path(body["lora_path"]))
            return b"Success"
        if path == "/v1/unload_lora_adapter":
            del self.adapters[body["lora_name"]]
            return b"Success"
        raise KeyError(path)

    def adapted(self, folder: Path) -> Any:
        """The weights with an adapter added to them, but for those that it silently keeps."""
        self.loads += 1
        config = json.loads((folder / "adapter_config.json").read_text())
        assert config["r"] <= self.rank
        parts, model = load_file(folder / "adapter_model.safetensors"), copy.deepcopy(self.weights)
        for name, low in parts.items():
            module = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
            if module != name.removeprefix("base_model.model.") and not self.keeps(module):
                high = parts[name.replace("lora_A", "lora_B")]
                with torch.no_grad():
                    model.get_submodule(module).weight.add_(config["lora_alpha"] / config["r"] * high @ low)
        return model

    def load(self, folder: Path) -> None:
        assert not self.asleep
        number, self.loads = self.loads, self.loads + 1
        new = load_file(folder / "model.safetensors")
        if self.load_fault(number):  # in the middle
            new = dict(list(new.items())[: len(new) // 2])
        with self.lock, torch.no_grad():
            for name, weight in self.weights.named_parameters():
                if name in new and not self.keeps(name):
                    weight.copy_(new[name])
        if self.load_fault(number):
            raise RuntimeError("the file ended early")

    def turn(self, body: dict[str, Any]) -> dict[str, Any]:
        """Sample a turn, once the server is not paused."""
        assert not self.asleep
        with self.changed:
            self.changed.wait_for(lambda: not self.paused)
            self.turns += 1
        try:
            return self.sampled(body)
        finally:
            with self.changed:
                self.turns -= 1
                self.changed.notify_all()

    def sampled(self, body: dict[str, Any]) -> dict[str, Any]:
        """Sample a turn by forward passes over all of the conversation."""
        sampling, ids = body["sampling_params"], list(body["token_ids"])
        assert sampling["ignore_eos"] and sampling["top_p"] == 1.0 and sampling["top_k"] == 0
        rng, content = np.random.default_rng(sampling["seed"]), []
        model = self.adapters.get(body["model"], self.weights)
        while True:
            with self.lock, torch.no_grad():
                logits = model(torch.tensor([ids])).logits[0, -1].double()
            logps = torch.log_softmax(logits / (sampling["temperature"] or 1.0), -1)
            if sampling["temperature"]:
                token = int(np.searchsorted(logps.exp().cumsum(-1).numpy(), rng.random()).clip(max=len(logps) - 1))
            else:
                token = int(logps.argmax())
            ids.append(token)
            content.append({"token_id": token, "logprob": float(logps[token]), "top_logprobs": []})
            if token in sampling["stop_token_ids"] or len(content) == sampling["max_tokens"]:
                break
        found = ids[-len(content) :]
        return {
            "request_id": f"generate-tokens-{body['request_id']}",
            "usage": {"prompt_tokens_details": None},
            "choices": [
                {
                    "token_ids": found,
                    "logprobs": {"content": content},
                    "weight_versions": [{"version": self.version, "start": 0, "end": len(found)}],
                }
            ],
        }


class _Http(ThreadingHTTPServer):
    request_queue_size = 256  # so many may knock at the same time


class _UnixHttp(_Http):
    address_family = socket.AF_UNIX

    def server_bind(self) -> None:
        self.socket.bind(self.server_address)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        self.do_POST()

    def do_POST(self) -> None:
        fake: FakeServer = self.server.fake  # type: ignore[attr-defined]
        path = self.path.split("?")[0]
        text = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        body = json.loads(text) if text else None
        self.close_connection = True
        if path in fake.missing:
            return self.send(404, b'{"detail":"Not Found"}')
        fault = Fault()
        try:
            if path == "/inference/v1/generate":
                with fake.lock:
                    number = len(fake.requests)
                    fake.requests.append(body)
                fault = fake.fault(number)
                if fault.drop:
                    return None
                if fault.latency and fake.closing.wait(fault.latency):
                    return None
                if body["model"] not in ("policy", *fake.adapters):
                    return self.send(404, b'{"error": {"message": "The model `x` does not exist."}}')
                answer = fake.turn(body)
                if fault.alter is not None:
                    fault.alter(answer)
            else:
                answer = fake.answer(path, body)
        except Exception as error:
            return self.send(500, json.dumps({"error": {"message": str(error)}}).encode())
        data = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
        data = data if fault.body is None else fault.body
        data = data * 2 if fault.twice else data
        if fake.closing.is_set():
            return None
        return self.send(fault.status, data, fault)

    def send(self, status: int, data: bytes, fault: Fault | None = None) -> None:
        fake: FakeServer = self.server.fake  # type: ignore[attr-defined]
        try:
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.send_header("Connection", "close")
            self.end_headers()
            if fault is not None and fault.trickle:
                for i in range(len(data)):
                    self.wfile.write(data[i : i + 1])
                    if fake.closing.wait(0.1):
                        return
            self.wfile.write(data[: len(data) // 2] if fault is not None and fault.cut else data)
        except OSError:
            pass  # the client has gone


def spoiled(change: Alter) -> Fault:
    return Fault(alter=change)


def nan(answer: dict[str, Any]) -> None:
    place(answer)["logprob"] = math.nan


def wait_until(true: Callable[[], bool], seconds: float = 300.0) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end
        time.sleep(0.01)

"""Servers that sample a run's turns: compared with what the run needs, and given its weights with proof."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list
from safetensors import SafetensorError
from transformers import PreTrainedTokenizerBase

from bpo_ref.config import ConfigError
from bpo_ref.running import colocated, folder
from bpo_ref.running.console import say
from bpo_ref.running.run_processes import all_refuse
from bpo_ref.sampling.chat_format import ChatFormat
from bpo_ref.sampling.engine import Engine, EngineError, Expected
from bpo_ref.sampling.served import Fleet
from bpo_ref.sampling.vllm import NCCL_DEVICES, VllmEngine
from bpo_ref.sampling.weights import Proof, Publisher, prompts_of
from sandboxgym.tree.envs import described

if TYPE_CHECKING:
    from bpo_ref.args import Args
    from bpo_ref.learning.models import CausalLM

Item = TypeVar("Item")

SAMPLE = "a task of many words: go to desk 1, search[red shoes], git diff"
"""Text on which tokenizers are compared."""


def publisher_of(
    args: Args,
    tokenizer: PreTrainedTokenizerBase,
    chat: ChatFormat,
    *,
    vocabulary: int,
    engines: Sequence[Engine] | None = None,
    device: torch.device | None = None,
) -> Publisher:
    """Make the publisher of the weights to engines, by default those that the settings name; nothing is sent yet.

    Raises:
        ConfigError: the weights cannot be sent from this device.
    """
    engines = [VllmEngine(url) for url in args.server] if engines is None else engines
    fleet = Fleet(engines, vocabulary=vocabulary, seconds=args.server_timeout, retries=args.server_retries)
    sampled = min(16, args.context // 2)
    proof = Proof(
        prompts_of(chat.start(SAMPLE), vocabulary=min(vocabulary, len(tokenizer)), room=args.context - sampled),
        temperature=args.temperature,
        tolerance=args.server_tolerance or (1e-3 if args.dtype == "float32" else 0.05),
        seconds=args.server_timeout,
        tokens=sampled,
    )
    where = Path(args.server_weights) if args.server_weights else Path(args.out) / "served"
    how: dict[str, Any] = {"adapters": args.server_sends == "adapters", "pinned": args.staleness > 0}
    if args.server_sends == "nccl":
        if device is None or device.type not in NCCL_DEVICES:
            raise ConfigError(f"server_sends: nccl sends from a GPU, and this process has {device}")
        how["device"] = device
    return Publisher(fleet, where, proof, dtype=getattr(torch, args.dtype), **how)


def difference(
    fleet: Fleet, args: Args, tokenizer: PreTrainedTokenizerBase, chat: ChatFormat, *, sleeps: bool
) -> str | None:
    """Compare the servers with what a run needs.

    Returns:
        A sentence about one that is not there, or serves something else; None if there is none.
    """
    text = tokenizer.decode(chat.start(SAMPLE))
    tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
    try:
        rank, nccl = args.lora_r if args.server_sends == "adapters" else 0, args.server_sends == "nccl"
        fleet.check(Expected(args.context, text, list(tokens), (args.temperature,), rank, sleeps, nccl))
    except EngineError as error:
        return f"server: {error}"
    return None


class Servers:
    """The servers of a run: asked by its first process, for all processes.

    Args:
        publisher: of the weights.
        accelerator: the processes of the run.
        sharded: whether weights are gathered into new tensors each time, which do not tell whether they have changed.
        sleeps: whether servers sleep between rollouts.
        own: the server that this process has started, if any.
    """

    def __init__(
        self,
        publisher: Publisher,
        accelerator: Accelerator,
        *,
        sharded: bool,
        sleeps: bool,
        own: colocated.OwnServer | None = None,
    ) -> None:
        self._publisher, self._accelerator, self._own = publisher, accelerator, own
        self._sharded, self._sleeps = sharded, sleeps
        self._have: Any = None  # name of the weights that servers have

    def fleet(self, policy: CausalLM, name: Any) -> Fleet:
        """Return the servers, awake and with these weights; all processes have to ask for them.

        Args:
            policy: the weights, whole.
            name: one that they alone have in this run, such as stage and step.

        Raises:
            EngineError: in all processes, if a server does not have them.
        """
        if self._sleeps:
            self._ask(self._publisher.fleet.wake)
        if name != self._have if self._sharded else not self._publisher.current(policy):
            version = self._ask(lambda: self._publisher.publish(policy))
            if not self._accelerator.is_main_process:
                self._publisher.follow(policy, version)
            self._have = name
        return self._publisher.fleet

    def left(self) -> None:
        """Let the servers sleep, if they should, once all processes have got their answers.

        Raises:
            EngineError: in all processes, if a server does not sleep.
        """
        if self._sleeps:
            self._accelerator.wait_for_everyone()
            self._ask(self._publisher.fleet.sleep)

    def close(self) -> None:
        """Remove the weights that were published, and end the server that this process has started."""
        if self._own is not None:
            self._own.close()
        if self._accelerator.is_main_process:
            self._publisher.close()

    def _ask(self, ask: Callable[[], Item]) -> Item:
        told: tuple[str | None, Any] = None, None
        cause: Exception | None = None
        if self._accelerator.is_main_process:
            try:
                told = None, ask()
            except Exception as error:  # the others wait for this process, whatever has happened to it
                cause = error
                told = str(error) if isinstance(error, EngineError) else self._reason(error), None
        if self._accelerator.num_processes > 1:
            told = broadcast_object_list([told])[0]
        failure, answer = told
        if cause is not None and not isinstance(cause, EngineError | OSError | SafetensorError):
            raise cause
        if failure is not None:
            raise EngineError(failure) from cause
        found: Item = answer
        return found

    def _reason(self, error: Exception) -> str:
        """Sentence about weights that could not be written, as on a full disk."""
        return f"server_weights: the weights cannot be written to {self._publisher.folder} ({described(error)})"


def reached(
    args: Args,
    model: CausalLM,
    tokenizer: PreTrainedTokenizerBase,
    chat: ChatFormat,
    accelerator: Accelerator,
    gather: Callable[[list[Any]], list[Any]],
    *,
    sharded: bool,
) -> Servers:
    """Find the servers of a run, or start them, and compare them with what it needs; all processes have to call it.

    Args:
        args: settings of the run.
        model: the policy, whole.
        tokenizer: of the policy.
        chat: format of its conversations.
        accelerator: the processes of the run.
        gather: collects the lists of all processes.
        sharded: see `Servers`.

    Raises:
        ConfigError: one is not there, or serves something else.
    """
    out, own, engines = Path(args.out), None, None
    start = [colocated.start_folder(args)] if args.colocated else []
    with _published_only_if_it_succeeds(out, accelerator):
        if args.colocated:
            if accelerator.is_main_process:
                say(f"{'server':<12} vLLM starts here; its log is in {out / 'servers'}")
                folder.published(out, *start)
            own, engines = colocated.started(args, model, tokenizer, accelerator, gather)
        size, device = model.config.vocab_size, accelerator.device
        publisher = publisher_of(args, tokenizer, chat, vocabulary=size, engines=engines, device=device)
        if accelerator.is_main_process:
            folder.published(out, publisher.writes, *start)
        sleeps = args.server_sleeps or (args.colocated and accelerator.device.type == "cuda")
        found = Servers(publisher, accelerator, sharded=sharded, sleeps=sleeps, own=own)
        try:
            all_refuse(accelerator, partial(difference, publisher.fleet, args, tokenizer, chat, sleeps=sleeps))
            if own is not None:
                found.left()  # asleep before the optimizer is made
        except BaseException:
            found.close()
            raise
        return found


@contextmanager
def _published_only_if_it_succeeds(out: Path, accelerator: Accelerator) -> Iterator[None]:
    """Remove what was written for servers: first that of a start that was killed, then that of this one if it fails."""
    if accelerator.is_main_process:
        folder.remove_published(out)
    try:
        yield
    except BaseException:
        if accelerator.is_main_process:
            folder.remove_published(out)
        raise

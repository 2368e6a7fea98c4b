"""Policy for `sandboxgym.tree.rollout` from an OpenAI-compatible chat endpoint (OpenAI, vLLM, SGLang, llama.cpp, …).

    envs = Envs(lambda: gym.make("sandboxgym/ALFWorld-v0"))
    with ChatEndpoint.connect("http://localhost:8000/v1", "my-model") as policy:
        trees = rollout(envs, policy, TopEntropy(2, width=3), tasks=range(8))
        trees = asyncio.run(rollout_async(envs, policy.each, TopEntropy(2, width=3), tasks=range(8)))  # the same ones

What this module promises:

1. Each path is one conversation; forks continue the conversation of the node at which they start.
2. All live paths are asked at the same time, at most ``concurrency`` of them. Timeouts and retries are the client's;
   its final errors are raised once no request is pending.
3. `Action.logp` is the sum of the tokens' log-probabilities as the endpoint reports them; their distribution need not
   be the one at the request's temperature.
4. `Action.entropy` is that of the first token, from its ``top_logprobs``, with all other tokens counted as one. This is
   a lower bound: the uncertainty among the other tokens is missing.
5. Connections of a client made by `ChatEndpoint.connect` are closed by `ChatEndpoint.close` or after ``with``, as are
   the threads of `ChatEndpoint.each`, once their requests have ended.

Needs ``pip install "sandboxgym[openai]"``.
"""

from __future__ import annotations

import asyncio
import math
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Self

from sandboxgym.adapters.prompts import Exchange, Prompt
from sandboxgym.tree import Action, Context

if TYPE_CHECKING:
    from openai import OpenAI

SYSTEM = "You act in an environment. Answer with the next command, on one line, and nothing else."


def show(context: Context) -> str:
    """The observation, followed by the admissible actions if the environment gives them."""
    commands = context.info.get("admissible_commands")
    return f"{context.observation}\nYou can:\n" + "\n".join(commands) if commands else str(context.observation)


def first_line(content: str) -> str:
    """First line of an answer, which is the command."""
    return content.strip().partition("\n")[0].strip()


class ChatEndpoint:
    """Policy that asks an endpoint for the next action of every live path (`sandboxgym.tree.Policy`).

    Args:
        client: an ``openai.OpenAI``; its ``timeout`` and ``max_retries`` apply to every request.
        model: name of the model.
        system: system prompt; "" for none.
        show: function from a step's context to the user message.
        read: function from an answer to its action.
        prompt: replaces ``system``, ``show`` and ``read``; the prompt with which a policy is trained and evaluated. An
            answer that it cannot read is an invalid action, and the next message says so.
        top_logprobs: number of alternatives of the first token to ask for; more improve the estimate of the entropy
            (OpenAI: at most 20). 0 asks for no log-probabilities: entropy and logp stay nan.
        max_tokens: maximum per answer; None omits it, for models that require ``max_completion_tokens`` instead.
        concurrency: maximum number of parallel requests.
        options: further fields of every request, such as ``temperature`` or ``stop``.

    Every request carries a ``seed`` from the path's own stream: if the endpoint honours it, rollouts are reproducible.
    The caller has to close a ``client`` that it passed.
    """

    def __init__(
        self,
        client: OpenAI,
        model: str,
        *,
        system: str = SYSTEM,
        show: Callable[[Context], str] = show,
        read: Callable[[str], Any] = first_line,
        prompt: Prompt | None = None,
        top_logprobs: int = 20,
        max_tokens: int | None = 64,
        concurrency: int = 16,
        **options: Any,
    ) -> None:
        if concurrency < 1:
            raise ValueError(f"expected at least one request at a time, found concurrency={concurrency}")
        self.client, self.model, self.concurrency = client, model, concurrency
        self._owns_client = False
        self._threads: ThreadPoolExecutor | None = None
        self._start = ({"role": "system", "content": system},) if system else ()
        self._show, self._read, self._prompt, self._top_logprobs = show, read, prompt, top_logprobs
        self._options = options if max_tokens is None else {"max_tokens": max_tokens, **options}
        if top_logprobs:
            self._options |= {"logprobs": True, "top_logprobs": top_logprobs}

    @classmethod
    def connect(
        cls,
        base_url: str,
        model: str,
        *,
        api_key: str | None = None,
        timeout: float = 60.0,
        max_retries: int = 3,
        **more: Any,
    ) -> Self:
        """Make a policy with its own client; ``timeout`` in seconds. The default key is ``$OPENAI_API_KEY``, or none.

        Raises:
            ImportError: the package ``openai`` is missing.
        """
        try:
            from openai import OpenAI
        except ImportError as error:
            raise ImportError('a chat endpoint needs the package openai: pip install "sandboxgym[openai]"') from error
        key = api_key or os.environ.get("OPENAI_API_KEY") or "none"
        client = OpenAI(base_url=base_url, api_key=key, timeout=timeout, max_retries=max_retries)
        try:
            made = cls(client, model, **more)
        except BaseException:
            client.close()
            raise
        made._owns_client = True
        return made

    def close(self) -> None:
        """Close the connections of a client that `connect` made, and threads. Idempotent."""
        if self._threads is not None:
            self._threads.shutdown(cancel_futures=True)
            self._threads = None
        if self._owns_client:
            self.client.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __call__(self, contexts: Sequence[Context]) -> list[Action | None]:
        """One action per context; None if the conversation exceeds the model's context.

        Raises:
            openai.APIError: the client gave up on a request.
            ValueError: log-probabilities were asked for, and none came.
        """
        seeds = [int(context.rng.integers(2**31)) for context in contexts]
        with ThreadPoolExecutor(
            min(self.concurrency, len(contexts) or 1), thread_name_prefix="sandboxgym-chat"
        ) as executor:
            return list(executor.map(self._decide, contexts, seeds))

    async def each(self, context: Context) -> Action | None:
        """The action for one context, as an `sandboxgym.tree.AsyncPolicy`; the rest is that of a call.

        A request of a call that is cancelled runs to its end, or to the client's timeout, in its thread.
        """
        if self._threads is None:
            self._threads = ThreadPoolExecutor(self.concurrency, thread_name_prefix="sandboxgym-chat")
        seed = int(context.rng.integers(2**31))
        return await asyncio.get_running_loop().run_in_executor(self._threads, self._decide, context, seed)

    def _decide(self, context: Context, seed: int) -> Action | None:
        past: tuple[Any, ...] = context.memory or (() if self._prompt else self._start)
        if self._prompt:
            messages = tuple(self._prompt.messages(past, context.observation, context.info))
        else:
            messages = (*past, {"role": "user", "content": self._show(context)})
        try:
            completion = self.client.chat.completions.create(
                model=self.model, messages=list(messages), seed=seed, **self._options
            )
        except Exception as error:  # the client is the caller's: openai need not be installed
            if _context_is_full(error):
                return None
            raise
        choice = completion.choices[0]
        content = choice.message.content or ""
        if self._prompt:
            text, complaint = self._prompt.hear(content, context.info)
            exchange = Exchange(str(context.observation), messages[-1]["content"], content, text, complaint)
            action = Action(text, memory=(*past, exchange), valid=not complaint)
        else:
            action = Action(self._read(content), memory=(*messages, {"role": "assistant", "content": content}))
        if self._top_logprobs:
            tokens = choice.logprobs.content if choice.logprobs is not None else None
            if not tokens or not tokens[0].top_logprobs:
                raise ValueError(
                    f"expected log-probabilities with the answer {content!r}, found none: does the endpoint report "
                    f"them for {self.model}? top_logprobs=0 does without, and without schedules that go by entropy"
                )
            action.entropy = entropy([token.logprob for token in tokens[0].top_logprobs])
            action.logp = sum(token.logprob for token in tokens)
        if completion.usage is not None:
            action.position, action.tokens = completion.usage.prompt_tokens, completion.usage.completion_tokens
        return action


def entropy(logprobs: Sequence[float]) -> float:
    """Entropy in nats of a distribution whose most likely outcomes are given, the rest counted as one outcome.

    >>> round(entropy([math.log(0.5), math.log(0.25)]), 4)  # the rest: 0.25
    1.0397
    """
    known = [math.exp(logprob) for logprob in logprobs]
    rest = 1.0 - math.fsum(known)
    return -math.fsum(p * math.log(p) for p in (*known, rest) if p > 0.0)


def _context_is_full(error: Exception) -> bool:
    """True if an error means that the context is full: OpenAI has a code for it, vLLM and SGLang only use words."""
    if getattr(error, "status_code", None) != 400:
        return False
    return getattr(error, "code", None) == "context_length_exceeded" or "context length" in str(error)

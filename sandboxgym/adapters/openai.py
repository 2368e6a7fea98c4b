"""A chat endpoint of the OpenAI kind (OpenAI, vLLM, SGLang, llama.cpp, …) as the policy of `sandboxgym.tree.rollout`.

    envs = Envs(lambda: gym.make("sandboxgym/ALFWorld-v0"))
    with ChatEndpoint.connect("http://localhost:8000/v1", "my-model") as policy:
        trees = rollout(envs, policy, TopEntropy(2, width=3), tasks=range(8))

What this module promises:

1. Each path is one conversation; forks go on from the conversation of the node that they start at.
2. All live paths are asked at the same time, at most ``concurrency`` of them. Timeouts and retries are the client's;
   what it gives up on is raised, when no request is under way any more.
3. `Action.logp` is the sum of the tokens' log-probabilities that the endpoint reports: under the distribution it
   reports, which need not be the one at the request's temperature.
4. `Action.entropy` is that of the first token, from its ``top_logprobs``, with all other tokens counted as one: a lower
   bound of the entropy that falls short by what is uncertain among the others.
5. Connections of a client that `ChatEndpoint.connect` made are closed by `ChatEndpoint.close` or after ``with``.

Needs ``pip install "sandboxgym[openai]"``.
"""

from __future__ import annotations

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
    """The observation, and what can be done where the environment says so."""
    commands = context.info.get("admissible_commands")
    return f"{context.observation}\nYou can:\n" + "\n".join(commands) if commands else str(context.observation)


def first_line(content: str) -> str:
    """The command in an answer: its first line."""
    return content.strip().partition("\n")[0].strip()


class ChatEndpoint:
    """Asks the endpoint for the next action of every live path (`sandboxgym.tree.Policy`).

    Args:
        client: an ``openai.OpenAI``; its ``timeout`` and ``max_retries`` hold for every request.
        model: name of the model.
        system: system prompt; "" for none.
        show: what the model is told of a step.
        read: the action in an answer.
        prompt: in place of ``system``, ``show`` and ``read``: what a policy is trained and evaluated with. An answer
            that it cannot read is an invalid action, and the next message says so.
        top_logprobs: how many alternatives of the first token to ask for; more make a better estimate of the entropy
            (OpenAI: at most 20). 0 asks for no log-probabilities: entropy and logp stay nan.
        max_tokens: of an answer; None leaves it out, for models that want ``max_completion_tokens`` instead.
        concurrency: most requests at a time.
        options: sent with every request, such as ``temperature`` or ``stop``.

    Every request carries a ``seed`` from the path's own stream: where the endpoint honours it, rollouts repeat.
    A ``client`` that was given stays the caller's to close.
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
        """With a client of its own; ``timeout`` in seconds. The default key is ``$OPENAI_API_KEY``, or none.

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
        """Close the connections of a client that `connect` made. Idempotent."""
        if self._owns_client:
            self.client.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __call__(self, contexts: Sequence[Context]) -> list[Action | None]:
        """One action a context; None where the conversation has outgrown the model's context.

        Raises:
            openai.APIError: the client gave up on a request.
            ValueError: log-probabilities were asked for, and none came.
        """
        seeds = [int(context.rng.integers(2**31)) for context in contexts]
        with ThreadPoolExecutor(
            min(self.concurrency, len(contexts) or 1), thread_name_prefix="sandboxgym-chat"
        ) as executor:
            return list(executor.map(self._decide, contexts, seeds))

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
        except Exception as error:
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
    """Entropy in nats of a distribution whose most likely outcomes are given, the rest taken for one outcome.

    >>> round(entropy([math.log(0.5), math.log(0.25)]), 4)  # the rest: 0.25
    1.0397
    """
    known = [math.exp(logprob) for logprob in logprobs]
    rest = 1.0 - math.fsum(known)
    return -math.fsum(p * math.log(p) for p in (*known, rest) if p > 0.0)


def _context_is_full(error: Exception) -> bool:
    """OpenAI has a code for it, vLLM and SGLang say it in words only."""
    if getattr(error, "status_code", None) != 400:
        return False
    return getattr(error, "code", None) == "context_length_exceeded" or "context length" in str(error)

"""Chats as exact token ids: token in, token out.

A conversation is one list of ids that only ever grows. Sampled ids are kept as they were drawn; only what the
environment says is tokenized, once, with the template's own tokens around it. So the ids that are trained on are the
ids that were sampled, and two conversations share a prefix whenever their histories do.

The environment's words are always plain text: where they spell a control token, they are not that token.

Text that a model writes token by token may tokenize otherwise (" drawer" as "dra", "wer"): decoding and encoding again
would train on tokens that were never sampled. Nothing here does.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sandboxgym.adapters.prompts import Exchange

if TYPE_CHECKING:
    from transformers import AddedToken, PreTrainedTokenizerBase

DATE = "26 Jul 2024"
"""Fixed date for templates that show today's, so that a run does not change at midnight."""


class TemplateError(ValueError):
    """Raised if the chat template, named in the message, does not let a conversation grow by appending tokens."""


@dataclass(frozen=True, slots=True)
class Turn:
    """The text and tokens that one turn added to a conversation: `Action.memory`. Forks share the turns before them."""

    before: Turn | None
    """The previous turn; None where a conversation begins: at the root, and at every turn if prompts show a window."""
    prompt: list[int]
    sampled: list[int]
    truncated: bool
    past: tuple[Exchange, ...] = ()
    """The episode so far in words, this turn included: the source of prompts."""

    def ids(self) -> list[int]:
        """Exact ids of the conversation up to here."""
        turns: list[Turn] = []
        turn: Turn | None = self
        while turn is not None:
            turns.append(turn)
            turn = turn.before
        return [token for turn in reversed(turns) for token in turn.prompt + turn.sampled]


class ChatFormat:
    """Conversion of text to the ids that a chat template would give, one appended turn at a time.

    The template is rendered once, on a dummy conversation, and cut into what stands before, between and after
    the messages. `stop_ids` end an assistant turn: the template's end-of-turn token, the tokenizer's eos token, and
    those of the model. Of observations longer than `observation_tokens` (0: no limit) the middle is left out.

    A conversation rendered at once must be the concatenation of its turns, except for two things that models that think
    before they answer need. What the template hides of earlier turns (reasoning) stays in the conversation as it was
    sampled: what was read and trained on is what was written. And what the header of the turn to be sampled has beyond
    that of earlier ones (``<think>``, or an empty block of it) stays there, too.

    Args:
        tokenizer: with a chat template.
        system: system prompt.
        observation_tokens: see above.
        stop_ids: further tokens that end a turn.

    Raises:
        TemplateError: anything else differs between the conversation at once and appended.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        system: str | None = None,
        observation_tokens: int = 0,
        stop_ids: Iterable[int] = (),
    ) -> None:
        self._tokenizer = tokenizer
        self._limit = 0
        self._name = f"chat template of {tokenizer.name_or_path or type(tokenizer).__name__}"
        texts = [" Question one. ", "answer one", " Question two. ", "answer two", " Question three. "]
        messages = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]
        if system is not None:
            messages.insert(0, {"role": "system", "content": system})
        rendered = str(
            tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, date_string=DATE)
        )

        self._strips = texts[0] not in rendered  # as Llama 3's template does
        pieces, rest = [], rendered
        for text in map(self._content, texts):
            before, found, rest = rest.partition(text)
            if not found:
                raise TemplateError(f"{self._name}: it drops or changes the message {text!r}: {rendered!r}")
            pieces.append(before)
        self._head, header, self._gap = pieces[:3]
        self._tail = rest if rest.startswith(header) else header
        added = {token.content: i for i, token in tokenizer.added_tokens_decoder.items()}
        end = max(filter(self._gap.startswith, added), key=len, default=None)
        if end is None:
            raise TemplateError(f"{self._name}: a turn must end in a special token, found {self._gap!r} after it")
        self.end_id: int = added[end]
        control = [t.content for t in tokenizer.added_tokens_decoder.values() if _is_control(t)]
        # At every place, because they may overlap; the longest, because one may begin another.
        longest_first = "|".join(map(re.escape, sorted(control, key=len, reverse=True)))
        self._control = re.compile(f"(?=({longest_first}))" if control else r"(?!)")
        self.stop_ids = tuple({self.end_id, tokenizer.eos_token_id, *stop_ids} - {None})

        opened = self._tail.removeprefix(header)
        self._thinks = "<think>" in opened and "</think>" not in opened
        self._check(rendered, texts, header)
        self._limit = observation_tokens

    def _check(self, rendered: str, texts: Sequence[str], header: str) -> None:
        """Check the prefix property on the ids of the dummy conversation."""
        tail, self._tail = self._tail, header
        thinks, self._thinks = self._thinks, False
        ids = self.demonstration(texts[0:4:2], texts[1:4:2])[0]
        self._tail, self._thinks = tail, thinks
        ids += self.turn(texts[4], truncated=False)
        whole = self._encode(rendered)
        if ids != whole:
            at = next((i for i, (a, b) in enumerate(zip(ids, whole)) if a != b), min(len(ids), len(whole)))
            raise TemplateError(
                f"{self._name}: three turns rendered at once differ from three appended turns after {at} tokens, at "
                f"{self._tokenizer.decode(whole[at : at + 8])!r} and {self._tokenizer.decode(ids[at : at + 8])!r}"
            )

    def start(self, observation: str) -> list[int]:
        """Ids of the system prompt, the first observation and the header of the assistant's turn."""
        return self._told(self._head, observation)

    def turn(self, observation: str, *, truncated: bool) -> list[int]:
        """Ids to append after a sampled turn, up to the header of the next one.

        A `truncated` turn lacks its end-of-turn token: it comes first here, as context that was not sampled.
        """
        ids = self._told(self._gap, observation)
        return ids if truncated else ids[1:]

    def action(self, ids: Sequence[int]) -> str:
        """Text of a sampled turn.

        Special tokens before the stop token stay visible: without them the environment might accept an action that the
        policy did not write.
        """
        body = ids[:-1] if ids and ids[-1] in self.stop_ids else ids
        return str(self._tokenizer.decode(list(body), clean_up_tokenization_spaces=False)).strip()

    def demonstration(
        self,
        observations: Sequence[str],
        actions: Sequence[str],
        learn: Sequence[bool] | None = None,
        *,
        observation_weight: float = 0.0,
    ) -> tuple[list[int], list[float]]:
        """Ids of a demonstrated episode, as sampling would have left them, with each id's weight in the loss.

        In the episode `actions[i]` answers `observations[i]`. The weight is 1 in an action and its end-of-turn token (0
        where not `learn[i]`), and `observation_weight` elsewhere. A reasoning block that the template opens is closed
        at once.
        """
        ids: list[int] = []
        weights: list[float] = []
        for observation, action, wanted in zip(observations, actions, learn or [True] * len(actions), strict=True):
            prompt = self.turn(observation, truncated=False) if ids else self.start(observation)
            answer = [*self._encode(("\n</think>\n\n" if self._thinks else "") + action.strip()), self.end_id]
            ids += prompt + answer
            weights += [observation_weight] * len(prompt) + [float(wanted)] * len(answer)
        return ids, weights

    def _shortened(self, text: str) -> str:
        """Cut the middle out of a text that is too long: beginning and end of an output say most."""
        if not self._limit or len(text) <= self._limit:  # a token is at least a character
            return text
        spans = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
        if len(spans) <= self._limit:
            return text
        head = self._limit // 2
        tail = self._limit - head
        return f"{text[: spans[head - 1][1] if head else 0].rstrip()} … {text[spans[-tail][0] :].lstrip()}"

    def answer_ids(self, text: str) -> list[int]:
        """Ids of an answer without a stop token, as in a demonstration."""
        return self._encode(text.strip())

    def text(self, ids: Sequence[int]) -> str:
        """Decode ids, special tokens included."""
        return str(self._tokenizer.decode(list(ids), clean_up_tokenization_spaces=False))

    @property
    def thinks(self) -> bool:
        """True if the template opens a block of reasoning for every turn."""
        return self._thinks

    def length(self, text: str) -> int:
        """Number of tokens of a text by itself."""
        return len(self._encode(text))

    def _told(self, before: str, observation: str) -> list[int]:
        """Ids of an observation and of the template's text before and after it.

        What the observation has in common with a control token is read as the letters that it is: it is cut after the
        first one. An environment shows files and pages, whose authors must not be able to open a turn of the policy.
        """
        content = self._content(self._shortened(observation))
        text, first, last = before + content + self._tail, len(before), len(before) + len(content)
        spans = (match.span(1) for match in self._control.finditer(text))
        cuts = [max(start + 1, first) for start, end in spans if start < last and end > first and start + 1 < end]
        places = [0, *sorted(set(cuts)), len(text)]
        return [token for start, end in itertools.pairwise(places) for token in self._encode(text[start:end])]

    def _content(self, text: str) -> str:
        return text.strip() if self._strips else text

    def _encode(self, text: str) -> list[int]:
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])


def _is_control(token: AddedToken) -> bool:
    """True for a token that is not its letters: special, or a tag, as ``<think>`` is in some models."""
    return len(token.content) > 1 and (token.special or (token.content[0] == "<" and token.content[-1] == ">"))

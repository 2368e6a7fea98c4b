"""Chats as exact token ids: token in, token out.

A conversation is one list of ids that only ever grows. Sampled ids are kept as they were drawn; only what the
environment says is tokenized, once, with the template's own tokens around it. So the ids that are trained on are the
ids that were sampled, and two conversations share a prefix whenever their histories do.
"""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase


class TemplateError(ValueError):
    """The chat template does not let a conversation grow by appending tokens."""


class ChatFormat:
    """Turns text into the ids a chat template would give, one appended turn at a time.

    The template is rendered once, on a dummy conversation, and cut into what stands before, between and after
    the messages. Raises `TemplateError` unless a conversation rendered at once is the concatenation of its turns.
    `stop_ids` end an assistant turn: the template's end-of-turn token and the tokenizer's eos token.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, system: str | None = None) -> None:
        self._tokenizer = tokenizer
        texts = [" Question one. ", "answer one", " Question two. ", "answer two", " Question three. "]
        messages = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]
        if system is not None:
            messages.insert(0, {"role": "system", "content": system})
        rendered = str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))

        self._strips = texts[0] not in rendered  # as Llama 3's template does
        pieces, rest = [], rendered
        for text in map(self._content, texts):
            before, found, rest = rest.partition(text)
            if not found:
                raise TemplateError(f"the template drops or changes the message {text!r}: {rendered!r}")
            pieces.append(before)
        self._head, self._tail, self._gap = pieces[:3]
        added = {token.content: i for i, token in tokenizer.added_tokens_decoder.items()}
        end = max(filter(self._gap.startswith, added), key=len, default=None)
        if end is None:
            raise TemplateError(f"a turn must end in a special token, but is followed by {self._gap!r}")
        self.end_id: int = added[end]
        self.stop_ids = tuple({self.end_id, tokenizer.eos_token_id} - {None})

        ids = self.demonstration(texts[0:4:2], texts[1:4:2])[0] + self.turn(texts[4], truncated=False)
        if ids != self._encode(rendered):
            raise TemplateError(
                "three turns rendered at once differ from three appended turns, as with templates that hide "
                f"earlier reasoning. At once: {rendered!r}; appended: {tokenizer.decode(ids)!r}"
            )

    def start(self, observation: str) -> list[int]:
        """The ids of the system prompt, the first observation and the header of the assistant's turn."""
        return self._encode(self._head + self._content(observation) + self._tail)

    def turn(self, observation: str, *, truncated: bool) -> list[int]:
        """The ids to append after a sampled turn, up to the header of the next one. A `truncated` turn lacks its
        end-of-turn token: it comes first here, as context that was not sampled.
        """
        ids = self._encode(self._gap + self._content(observation) + self._tail)
        return ids if truncated else ids[1:]

    def action(self, ids: Sequence[int]) -> str:
        """The text of a sampled turn. Special tokens before the stop token stay visible: without them the
        environment might accept an action that the policy did not write.
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
        """The ids of an episode in which `actions[i]` answered `observations[i]`, as sampling would have left
        them, and each one's weight in the loss: 1 in actions with their end-of-turn tokens (0 where not `learn[i]`),
        `observation_weight` elsewhere.
        """
        ids: list[int] = []
        weights: list[float] = []
        for observation, action, wanted in zip(observations, actions, learn or [True] * len(actions), strict=True):
            prompt = self.turn(observation, truncated=False) if ids else self.start(observation)
            answer = [*self._encode(action.strip()), self.end_id]
            ids += prompt + answer
            weights += [observation_weight] * len(prompt) + [float(wanted)] * len(answer)
        return ids, weights

    def _content(self, text: str) -> str:
        return text.strip() if self._strips else text

    def _encode(self, text: str) -> list[int]:
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])

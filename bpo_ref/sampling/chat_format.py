"""Chats as exact token ids, for the trainer's modules: those of `sandboxgym.adapters.tokens.chat_format`."""

from sandboxgym.adapters.tokens.chat_format import DATE, ChatFormat, TemplateError

__all__ = ["DATE", "ChatFormat", "TemplateError"]

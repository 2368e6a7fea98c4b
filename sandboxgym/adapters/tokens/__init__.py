"""Tokens in, tokens out: chats as exact ids, and rollout trees of them for the trainers of others."""

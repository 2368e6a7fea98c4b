"""Turns of a language model: from chats to token ids to sampled answers, as the policy of a rollout tree."""

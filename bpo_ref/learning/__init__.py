"""The network and what it learns from: models, rows of tokens, shared prefixes, checkpoints."""

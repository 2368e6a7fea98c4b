"""The network and its training data: models, batches of tokens, shared prefixes, checkpoints."""

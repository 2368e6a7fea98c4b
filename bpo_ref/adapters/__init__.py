"""The algorithms in trainers of others."""

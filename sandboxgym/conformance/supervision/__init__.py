"""Watched processes for runs of the suite, and their cleanup."""

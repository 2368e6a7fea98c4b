"""Runs of the suite in watched processes, and what they leave."""

"""Shared parts of the commands: terminal output, downloads, game histories."""

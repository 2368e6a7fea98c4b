"""Folder of a run, which no other run may take, its environments, and its output on the terminal or in a log."""

"""Folder of a run, which no other run may take, and its output on the terminal or in a log file."""

"""Sandboxes with a task's repository in place."""

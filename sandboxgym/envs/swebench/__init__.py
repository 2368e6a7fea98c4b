"""SWE-bench in copy-on-write sandboxes, graded by the official code in a fork."""

"""SWE-bench in copy-on-write sandboxes, graded in a fork by the official code."""

"""Rows of SWE-bench's format: read, completed, checked, turned into tasks."""

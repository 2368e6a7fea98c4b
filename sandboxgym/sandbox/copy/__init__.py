"""The ``copy`` backend: copied directories and plain processes."""

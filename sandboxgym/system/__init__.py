"""Operating-system support: run directories, directory trees of any depth, other interpreters."""

"""The machine: run directories, directory trees of any depth, other interpreters."""

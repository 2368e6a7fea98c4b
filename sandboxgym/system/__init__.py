"""The machine: processes, run directories, directory trees, other interpreters."""

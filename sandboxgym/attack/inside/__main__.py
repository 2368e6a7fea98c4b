"""The loop of the program inside: ``python3 -m inside`` reads requests and writes answers."""

from . import disk, files, kernel, load, marks, network, privileges, shared
from .answers import serve

MODULES = (disk, files, kernel, load, marks, network, privileges, shared)
"""Imported for what they register."""

if __name__ == "__main__":
    serve()

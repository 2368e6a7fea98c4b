"""The loop of the program inside: ``python3 -m inside`` reads requests and writes answers."""

from . import disk, files, kernel, load, marks, network, privileges, shared
from .answers import serve

MODULES = (disk, files, kernel, load, marks, network, privileges, shared)
"""Modules that are imported because they register attempts."""

if __name__ == "__main__":
    serve()

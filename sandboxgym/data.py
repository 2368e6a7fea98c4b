"""Data sets and caches: descriptions, and directories on this machine.

1. Downloaded data sets lie under ``$SANDBOXGYM_DATA``, by default the user's data directory; files that can be made
   again (compiled games, indices) lie under ``$SANDBOXGYM_CACHE``, by default the user's cache directory.
2. `find` says where a data set is, the same for every environment: the variable that the field uses for it, if it has
   one, else its directory under `data_dir`. Each environment declares its data sets in its own folder (`EnvCard`).
3. Nothing here touches the network: ``sandboxgym download`` does.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path


class NoHomeDirectory(FileNotFoundError):
    """The user has no home directory, and no variable names another one."""


def data_dir() -> Path:
    """Root of the data sets. Not created here.

    Raises:
        NoHomeDirectory: neither the variable nor this user's home directory says where it is.
    """
    return _root("SANDBOXGYM_DATA", "user_data_dir")


def cache_dir() -> Path:
    """Root of what can be made again. Not created here.

    Raises:
        NoHomeDirectory: as by `data_dir`.
    """
    return _root("SANDBOXGYM_CACHE", "user_cache_dir")


def _root(variable: str, kind: str) -> Path:
    if named := os.environ.get(variable):
        return Path(named)
    import platformdirs  # not part of `import sandboxgym`

    try:
        found = Path(getattr(platformdirs, kind)("sandboxgym", appauthor=False))
    except RuntimeError:
        found = Path("~")  # as its older versions return
    if not found.is_absolute():  # as in a container with any number as its user
        raise NoHomeDirectory(f"expected {variable} to name a directory, for this user has no home directory")
    return found


@dataclass(frozen=True, slots=True)
class DataFile:
    """One published file of a data set."""

    name: str
    """Name of the file in the data set's directory; for an archive, of the archive."""
    url: str
    sha256: str | None = None
    """Pinned only if the published file was hashed; else the first download is recorded and later ones compared."""
    holds: tuple[str, ...] = ()
    """Patterns of an archive's files, of which one matches once it is unpacked."""
    other_names: tuple[str, ...] = ()
    """Names under which the file, or the same content in another format, may be given with ``--from``."""

    @property
    def is_archive(self) -> bool:
        """True if the file is unpacked after download."""
        return bool(self.holds)

    def present(self, root: Path) -> Path | None:
        """Path, below the data set's directory, of a file that shows that this part is present."""
        patterns = self.holds or (self.name, *self.other_names)
        return next((path for pattern in patterns for path in root.glob(pattern)), None)


@dataclass(frozen=True, slots=True)
class DataSet:
    """A data set that an environment can use in place of its embedded data."""

    name: str
    about: str
    licence: str
    parts: dict[str, tuple[DataFile, ...]]
    """Parts that can be downloaded separately; the first is the default."""
    about_parts: dict[str, str] = field(default_factory=dict)
    variable: str | None = None
    """Environment variable that names its directory, checked first."""
    check: str = ""
    """Hook (``package.module:function``): opens what lies in a directory as the environment does and returns what was
    found, a line each; a ValueError says what is wrong with it. Empty: files are looked at from outside."""


SANDBOX_CACHE = {
    "sandbox": "root file systems: the host's tool chain, unpacked images",
    "image-layers": "layers of images from registries",
}
"""The directory under `cache_dir` that no environment declares, and what it holds."""


def directory(dataset: DataSet) -> Path:
    """Directory of a data set, present or not: that of its environment variable, else the default."""
    named = os.environ.get(dataset.variable) if dataset.variable else None
    return Path(named) if named else data_dir() / dataset.name


def find(dataset: DataSet) -> Path | None:
    """The directory of a data set; None if there is none.

    A directory that the data set's variable names is returned even if it does not exist, so that the error about it
    names it.
    """
    try:
        path = directory(dataset)
    except NoHomeDirectory:
        return None
    named = dataset.variable is not None and bool(os.environ.get(dataset.variable))
    if named:
        return path
    # A directory with nothing but a download under way is not the data set yet.
    return path if path.is_dir() and any(not entry.name.startswith(".") for entry in path.iterdir()) else None


def parts_found(dataset: DataSet) -> list[str]:
    """Parts of a data set whose files are all present."""
    try:
        root = directory(dataset)
    except NoHomeDirectory:
        return []
    return [part for part, files in dataset.parts.items() if all(file.present(root) for file in files)]

"""Directories and sources of data sets and caches.

1. Downloaded data sets lie under ``$SANDBOXGYM_DATA``, by default the user's data directory; files that can be made
   again (compiled games, indices) lie under ``$SANDBOXGYM_CACHE``, by default the user's cache directory.
2. `find` says where a data set is, the same for every environment: the variable that the field uses for it, if it has
   one (``$ALFWORLD_DATA``), else its directory under `data_dir`.
3. Nothing here touches the network: ``sandboxgym download`` does.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

import platformdirs


def data_dir() -> Path:
    """Root directory of the data sets. Not created here."""
    return Path(os.environ.get("SANDBOXGYM_DATA") or platformdirs.user_data_dir("sandboxgym", appauthor=False))


def cache_dir() -> Path:
    """Root directory of files that can be made again. Not created here."""
    return Path(os.environ.get("SANDBOXGYM_CACHE") or platformdirs.user_cache_dir("sandboxgym", appauthor=False))


@dataclass(frozen=True, slots=True)
class DataFile:
    """One published file of a data set."""

    name: str
    """Name of the file in the data set's directory; for an archive, of the archive."""
    url: str
    sha256: str | None = None
    """Pinned only if the published file was hashed; else the first download is recorded and later ones compared."""
    holds: tuple[str, ...] = ()
    """For an archive: patterns, of which one matches a file once it is unpacked."""
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
    env_id: str
    about: str
    licence: str
    parts: dict[str, tuple[DataFile, ...]]
    """Parts that can be downloaded separately; the first is the default."""
    about_parts: dict[str, str] = field(default_factory=dict)
    variable: str | None = None
    """Environment variable that names its directory, checked first."""


_ALFWORLD = "https://github.com/alfworld/alfworld/releases/download"
# The addresses of the original's set-up script, in the form that answers with the file rather than a page about it.
_DRIVE = "https://drive.usercontent.google.com/download?export=download&confirm=t&id="
_HUB = "https://huggingface.co/datasets/princeton-nlp"


def _each(name: str) -> tuple[str, ...]:
    """A file in the directory of every trial, split/task/trial/."""
    return (f"json_2.1.1/*/*/*/{name}", f"*/*/*/{name}")


def _rows(name: str, repository: str) -> tuple[DataFile, ...]:
    url = f"{_HUB}/{repository}/resolve/main/data/test-00000-of-00001.parquet"
    return (DataFile(f"{name}.parquet", url, other_names=(f"{name}.jsonl", f"{name}.json")),)


_HUMAN = DataFile("items_human_ins.json", _DRIVE + "14Kb5SPBk_jfdLZ_CDBNitW98QLDlKR5O")
DATASETS: dict[str, DataSet] = {
    dataset.name: dataset
    for dataset in (
        DataSet(
            "alfworld",
            "sandboxgym/ALFWorld-v0",
            "the 4,027 official games (games=train, valid_train, valid_seen, valid_unseen)",
            "MIT (ALFWorld, ALFRED)",
            {
                "games": (
                    DataFile(
                        "json_2.1.2_tw-pddl.zip",
                        f"{_ALFWORLD}/0.4.0/json_2.1.2_tw-pddl.zip",
                        holds=_each("game.tw-pddl"),
                    ),
                ),
                "annotations": (
                    DataFile(
                        "json_2.1.1_json.zip",
                        f"{_ALFWORLD}/0.2.2/json_2.1.1_json.zip",
                        holds=_each("traj_data.json"),
                    ),
                ),
                "pddl": (
                    DataFile(
                        "json_2.1.1_pddl.zip",
                        f"{_ALFWORLD}/0.2.2/json_2.1.1_pddl.zip",
                        holds=_each("initial_state.pddl"),
                    ),
                ),
            },
            {
                "games": "game.tw-pddl files: all that sandboxgym reads",
                "annotations": "traj_data.json files, which the original engine's loader asks for",
                "pddl": "initial states, which only the original's tools read",
            },
            variable="ALFWORLD_DATA",
        ),
        DataSet(
            "webshop",
            "sandboxgym/WebShop-v0",
            "the original's product catalogue, goals and human instructions",
            "code MIT; product text scraped by the original's authors",
            {
                "1000": (
                    DataFile("items_shuffle_1000.json", _DRIVE + "1EgHdxQ_YxqIQlvvq5iKlCrkEKR6-j0Ib"),
                    DataFile("items_ins_v2_1000.json", _DRIVE + "1IduG0xl544V_A_jv3tHXC0kyFi7PnyBu"),
                    _HUMAN,
                ),
                "all": (
                    DataFile("items_shuffle.json", _DRIVE + "1A2whVgOO0euk5O13n2iYDM0bQRkkRduB"),
                    DataFile("items_ins_v2.json", _DRIVE + "1s2j6NgHljiZzQNL3veZaAiyW_qDEgBNi"),
                    _HUMAN,
                ),
            },
            {"1000": "the first 1,000 products", "all": "all 1,181,436 products (several GB)"},
        ),
        DataSet(
            "swebench",
            "sandboxgym/SWEBench-v0",
            "SWE-bench rows (issue, commit, tests, gold patch); `sandboxgym swebench images` gets container images",
            "MIT (SWE-bench); each repository has its own",
            {
                "verified": _rows("verified", "SWE-bench_Verified"),
                "lite": _rows("lite", "SWE-bench_Lite"),
                "full": _rows("full", "SWE-bench"),
            },
            {
                "verified": "500 rows that people checked (about 2 MB)",
                "lite": "300 rows",
                "full": "2,294 rows of the test split",
            },
        ),
    )
}
CACHES = {
    "alfworld": "compiled games",
    "webshop": "catalogue and search index",
    "swebench": "prepared tasks",
    "sandbox": "root file systems: the host's tool chain, unpacked images",
}
"""Directories under `cache_dir` and their content; ``sandboxgym gc --all`` deletes these and no others."""


def directory(name: str) -> Path:
    """Directory of a data set, present or not: that of its environment variable, else the default.

    Raises:
        KeyError: no such data set.
    """
    dataset = DATASETS[name]
    named = os.environ.get(dataset.variable) if dataset.variable else None
    return Path(named) if named else data_dir() / name


def find(name: str) -> Path | None:
    """The directory of a data set; None if there is none.

    A directory that the data set's variable names is returned even if it does not exist, so that the error about it
    names it.
    """
    dataset = DATASETS[name]
    path = directory(name)
    named = dataset.variable is not None and bool(os.environ.get(dataset.variable))
    if named:
        return path
    # A directory with nothing but a download under way is not the data set yet.
    return path if path.is_dir() and any(not entry.name.startswith(".") for entry in path.iterdir()) else None


def parts_found(name: str) -> list[str]:
    """The parts of a data set whose files are all present."""
    root = directory(name)
    return [part for part, files in DATASETS[name].parts.items() if all(file.present(root) for file in files)]

"""``sandboxgym download``: install a data set where `data.find` looks, from its published address or a local file.

1. If a call is killed at any moment, the next one continues; installed files are always complete.
2. Content is checked against a pinned checksum if there is one, else against the one that the first download recorded
   in ``downloads.json`` beside the data.
3. A file that is present and unchanged is not fetched again; free space is checked before writing.
4. At the end the data is opened in the same way as by the environment.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from sandboxgym import data
from sandboxgym.cli import OK, USAGE, CommandError
from sandboxgym.cli.environments import import_modules
from sandboxgym.cli.support.printing import nbytes_text
from sandboxgym.cli.support.progress import progress
from sandboxgym.cli.support.transfer import ChecksumMismatch, TransferError, TransferProgress, fetch, forget, sha256
from sandboxgym.cli.support.unpack import UnsafeArchive, merge, unpack
from sandboxgym.data import DataFile
from sandboxgym.registration import data_sets, hook
from sandboxgym.system.atomic import write_atomic
from sandboxgym.system.run_directories import try_lock

RECORD = "downloads.json"
SCRATCH = ".downloads"
LOCK = "lock"
SPARE = 64 * 2**20
"""Bytes that a download leaves free on the disk, at least."""


def main(argv: Sequence[str]) -> int:
    """Run ``sandboxgym download``; returns the exit status."""
    options = _parser(argv).parse_args(argv)
    dataset = data_sets()[options.dataset]
    root = Path(options.dir).expanduser().absolute() if options.dir else data.directory(dataset)
    parts = options.part or [next(iter(dataset.parts))]
    unknown = [part for part in parts if part not in dataset.parts]
    if unknown:
        raise CommandError(f"{dataset.name} has the parts {', '.join(dataset.parts)}, not {unknown[0]!r}", status=USAGE)
    files = list({file.name: file for part in parts for file in dataset.parts[part]}.values())
    source = Path(options.source).expanduser() if options.source else None
    if source is not None and not source.exists():
        raise CommandError(f"--from {source}: no such file or directory", status=USAGE)
    if source is not None and source.is_file() and len(files) > 1:
        names = ", ".join(file.name for file in files)
        raise CommandError(f"--from takes a directory here: {dataset.name} needs {names}", status=USAGE)
    print(f"{dataset.name}: {dataset.about}\nlicence: {dataset.licence}\ninto {root}")
    try:
        for file in files:
            print(f"{file.name}: {install(file, root, source=source, mirror=options.mirror, force=options.force)}")
        for line in check(dataset, root):
            print(line)
    except (TransferError, UnsafeArchive, OSError) as error:
        raise CommandError(f"{error}\n\n{_by_hand(dataset.name, files, root)}") from error
    if root != data.directory(dataset):
        print(_how_to_point(dataset, root))
    return OK


def install(
    file: DataFile,
    root: Path,
    *,
    source: Path | None = None,
    mirror: str | None = None,
    force: bool = False,
    show: TransferProgress | None = None,
) -> str:
    """Install one file of a data set.

    Args:
        file: the file.
        root: directory of the data set; created if necessary.
        source: local file, or directory that contains it, to use instead of the network.
        mirror: fetch ``mirror/NAME`` instead of the published address.
        force: fetch and install it again.
        show: callback for the progress.

    Returns:
        A short description of what was done.

    Raises:
        TransferError: see `fetch`; ChecksumMismatch among them.
        UnsafeArchive: see `unpack`.
        OSError: the disk is full, or not writable.
    """
    with _alone(root):
        return _install(file, root, source, mirror, force, show or progress())


def _install(
    file: DataFile, root: Path, source: Path | None, mirror: str | None, force: bool, show: TransferProgress
) -> str:
    there = file.present(root)
    recorded = _read_record(root).get(file.name)
    part, staging = root / SCRATCH / f"{file.name}.part", root / SCRATCH / f"{file.name}.unpacked"
    if there is not None and not (force or part.exists() or staging.exists()):  # otherwise it was interrupted
        if recorded is None:
            return "already there, though not from this command; --force fetches it"
        if not file.is_archive:
            _verify(file, there, recorded)
        return "already there"
    room = _room(root)
    if source is None:
        origin = f"{mirror.rstrip('/')}/{file.name}" if mirror else file.url
        try:
            fetch(origin, part, progress=show, check_room=room)
        except BaseException:
            if part.exists() and part.stat().st_size == 0:
                forget(part)
            raise
        content, name = part, file.name
    else:
        origin = str(source.absolute())
        content = _in(source, file)
        name = content.name if file.is_archive or content.name in file.other_names else file.name
    digest, nbytes = sha256(content), content.stat().st_size
    expected = file.sha256 or (None if recorded is None or recorded["name"] != name else recorded["sha256"])
    if expected is not None and digest != expected:
        if content == part:
            forget(part)
        raise ChecksumMismatch(_mismatch(file, content, expected, digest, root))
    if file.is_archive:
        done = f"{_put_archive(file, content, staging, root, show)} files unpacked"
    else:
        if source is not None:
            room(nbytes)
            shutil.copyfile(content, part)
        part.replace(root / name)
        done = nbytes_text(nbytes)
    _write_record(root, file.name, {"name": name, "sha256": digest, "nbytes": nbytes, "from": origin})
    forget(part)
    pinned = "as pinned" if file.sha256 else "as recorded before" if expected else f"recorded in {RECORD}"
    return f"{done}; sha256 {digest[:16]}… {pinned}"


def _put_archive(file: DataFile, content: Path, staging: Path, root: Path, show: TransferProgress) -> int:
    """Unpack beside the data, then move it there; until that is done, ``staging`` exists."""
    try:
        count = unpack(content, staging, progress=show, check_room=_room(root))
        if file.present(staging) is None:
            raise UnsafeArchive(f"{content}: expected {' or '.join(file.holds)} in the archive")
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise
    merge(staging, root)
    return count


def check(dataset: data.DataSet, root: Path) -> list[str]:
    """Open a data set as its environment does; returns the findings as lines.

    Raises:
        TransferError: the environment cannot read the data.
    """
    if not dataset.check:
        return _check_files(dataset, root)
    try:
        found: list[str] = hook(dataset.check)(root)
    except ValueError as error:
        raise TransferError(str(error)) from error
    return found


def _check_files(dataset: data.DataSet, root: Path) -> list[str]:
    lines = []
    kept = {file.name: file for files in dataset.parts.values() for file in files if not file.is_archive}
    for path in filter(None, (file.present(root) for file in kept.values())):
        with open(path, "rb") as file:
            head = file.read(64).lstrip()
            file.seek(-min(64, path.stat().st_size), 2)
            tail = file.read().rstrip()
        whole = {
            ".parquet": head[:4] == b"PAR1" == tail[-4:],
            ".json": head[:1] in (b"[", b"{") and tail[-1:] in (b"]", b"}"),
            ".jsonl": head[:1] == b"{" and tail[-1:] == b"}",
        }
        if not whole.get(path.suffix, True):
            raise TransferError(f"{path} is not a {path.suffix[1:]} file: it begins with {head[:20]!r}")
        lines.append(f"{path.name}: {nbytes_text(path.stat().st_size)}")
    return lines


def _parser(argv: Sequence[str]) -> argparse.ArgumentParser:
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    first.add_argument(
        "--import", dest="modules", nargs="+", default=[], metavar="MODULE", help="packages whose data sets to include"
    )
    import_modules(first.parse_known_args(argv)[0].modules)  # they register data sets
    known = data_sets()
    about = "\n".join(
        f"  {f'{dataset.name} {part}':<22} {dataset.about_parts.get(part, '')}"
        for dataset in known.values()
        for part in dataset.parts
    )
    parser = argparse.ArgumentParser(
        prog="sandboxgym download",
        description="Download a data set, resuming an interrupted download. The default part is the first one listed.",
        epilog=f"parts:\n{about}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        parents=[first],
    )
    parser.add_argument("dataset", choices=list(known))
    parser.add_argument("--part", nargs="+", metavar="PART", help="which parts, see below")
    parser.add_argument("--dir", help="target directory (default: where the environment looks)")
    parser.add_argument("--from", dest="source", metavar="PATH", help="take the files from here instead of the network")
    parser.add_argument("--mirror", metavar="URL", help="fetch URL/NAME instead of the published addresses")
    parser.add_argument("--force", action="store_true", help="download again, even if it is there")
    return parser


@contextlib.contextmanager
def _alone(root: Path) -> Iterator[None]:
    """Keep other processes from downloading into the same directory; remove the directory if it stays empty."""
    scratch = root / SCRATCH
    is_new = not root.exists()
    scratch.mkdir(parents=True, exist_ok=True)
    with open(scratch / LOCK, "ab") as lock:
        if not try_lock(lock):
            raise TransferError(f"another process is downloading into {root}")
        try:
            yield
        finally:
            if [path.name for path in scratch.iterdir()] == [LOCK]:
                (scratch / LOCK).unlink()
                scratch.rmdir()
                if is_new and not any(root.iterdir()):
                    root.rmdir()


def _in(source: Path, file: DataFile) -> Path:
    if source.is_file():
        return source
    names = (file.name, *file.other_names)
    for name in names:
        if (source / name).is_file():
            return source / name
    raise TransferError(f"{source} does not hold {' or '.join(names)}")


def _room(root: Path) -> Callable[[int], None]:
    def check_room(nbytes: int) -> None:
        free = shutil.disk_usage(root).free
        if free < nbytes + SPARE:
            raise TransferError(f"{nbytes_text(nbytes)} are needed under {root}, {nbytes_text(free)} are free")

    return check_room


def _verify(file: DataFile, there: Path, recorded: dict[str, Any]) -> None:
    digest = sha256(there)
    expected = file.sha256 or recorded["sha256"]
    if digest != expected and there.name == recorded["name"]:
        raise ChecksumMismatch(
            f"{there} has changed since it was downloaded: expected sha256 {expected}, found {digest}; "
            "--force fetches it again"
        )


def _mismatch(file: DataFile, content: Path, expected: str, found: str, root: Path) -> str:
    if file.sha256:
        return f"{content.name}: expected sha256 {expected} (pinned), found {found}"
    return (
        f"{content.name}: expected sha256 {expected}, as recorded by the first download, found {found}; if the "
        f"published file was meant to change, delete the entry {file.name!r} of {root / RECORD}"
    )


def _read_record(root: Path) -> dict[str, dict[str, Any]]:
    path = root / RECORD
    try:
        content: dict[str, dict[str, Any]] = json.loads(path.read_bytes())
        for entry in content.values():
            _ = str(entry["name"]), str(entry["sha256"])
    except FileNotFoundError:
        return {}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise TransferError(f"{path} is not a record of downloads ({error}): delete it to start a new one") from error
    return content


def _write_record(root: Path, name: str, entry: dict[str, Any]) -> None:
    record = _read_record(root)
    record[name] = {**entry, "date": time.strftime("%Y-%m-%d")}
    write_atomic(root / RECORD, json.dumps(record, indent=2, sort_keys=True).encode() + b"\n")


def _how_to_point(dataset: data.DataSet, root: Path) -> str:
    if dataset.variable:
        return f"the environment looks in {data.directory(dataset)}: export {dataset.variable}={root}"
    if root.name == dataset.name:
        return f"the environment looks in {data.directory(dataset)}: export SANDBOXGYM_DATA={root.parent}"
    return f"the environment looks in {data.directory(dataset)}: move {root} there"


def _by_hand(name: str, files: Sequence[DataFile], root: Path) -> str:
    lines = ["Without a network here, fetch on another machine:"]
    lines += [f"  curl -L -C - -o {file.name} '{file.url}'" for file in files]
    lines += ["and hand them in with:", f"  sandboxgym download {name} --from DIRECTORY"]
    if any(file.is_archive for file in files):
        lines.append(f"or unpack them into {root} yourself.")
    else:
        lines.append(f"or put them into {root} yourself.")
    return "\n".join(lines)

"""Root file systems for sandboxes: the host's tool chain, an unpacked directory, a Docker image.

1. `host` needs neither image nor daemon. It shows the host's programs and libraries read-only, a Python with pytest in
   ``/opt/python``, an /etc made for it, and empty /root, /home, /tmp. It shows no home directory, no credentials, no
   sockets, no other packages of this Python, and neither this package nor its data and caches, wherever they lie.
2. `image` uses the layers of a local image where the daemon keeps them, without a copy, if this process may read them
   (root, storage driver overlay2); else it unpacks the image once into the cache. It never fetches an image.
3. Entries of the cache appear complete or not at all; two processes that need one make it once.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import json
import os
import platform
import py_compile
import shutil
import stat
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from sandboxgym import data
from sandboxgym.brief import brief
from sandboxgym.registration import data_sets
from sandboxgym.sandbox.base import RootFS, SandboxUnavailable
from sandboxgym.sandbox.files.copy import copy_attributes
from sandboxgym.sandbox.files.portable import entries
from sandboxgym.system import run_directories
from sandboxgym.system.once import made_once

_PYTHON = "/opt/python"
_PATH = f"{_PYTHON}/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_TOP = ("bin", "sbin", "lib", "lib32", "lib64", "libx32")
_PREFIX_PARTS = ("bin", "include", "lib", "lib64", "libexec", "share", "ssl")
"""Parts of an interpreter's prefix: a conda prefix also holds other environments and a cache of packages."""
_FOLDERS = {"root": 0o700, "home": 0o755, "tmp": 0o1777, "var/tmp": 0o1777, "run": 0o755, "dev": 0o755, "proc": 0o555}
_FOLDERS |= {"sys": 0o555, "mnt": 0o755, "opt": 0o755, "etc": 0o755, "var/lib": 0o755, "var/log": 0o755}
_ETC = {
    "passwd": "root:x:0:0:root:/root:/bin/bash\nnobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin\n",
    "group": "root:x:0:\ntty:x:5:\nnogroup:x:65534:\n",
    "nsswitch.conf": "passwd: files\ngroup: files\nhosts: files dns\nprotocols: files\nservices: files\n",
    "gitconfig": "[safe]\n\tdirectory = *\n",
    "shells": "/bin/sh\n/bin/bash\n",
}
_ETC_COPIED = ("ld.so.cache", "ld.so.conf", "os-release", "protocols", "services", "mime.types", "debian_version")
_ETC_FOLDERS = ("ld.so.conf.d", "alternatives")
_CERTIFICATES = ("/etc/ssl/certs", "/etc/pki/tls/certs", "/etc/pki/ca-trust/extracted")
_OURS = ("sandboxgym", "bpo_ref")


def resolve(spec: str | os.PathLike[str] | RootFS) -> RootFS:
    """Find a root file system by its name.

    Args:
        spec: ``"host"``, ``"docker:IMAGE"``, or the path of an unpacked directory.

    Raises:
        ValueError: none of these.
        SandboxUnavailable: it is not to be had on this machine.
    """
    if isinstance(spec, RootFS):
        return spec
    text = os.fspath(spec)
    if text == "host":
        return host()
    if text.startswith("docker:"):
        return image(text.removeprefix("docker:"))
    if not os.path.isdir(text):
        raise ValueError(f"expected 'host', 'docker:IMAGE' or the path of an unpacked directory, found {text!r}")
    return directory(text)


def directory(path: str | os.PathLike[str]) -> RootFS:
    """Root file system of an unpacked directory; it must not change while sandboxes run on it.

    Raises:
        ValueError: not a directory, or the root of this machine.
    """
    root = Path(path).resolve()
    if not root.is_dir() or root.samefile("/"):
        raise ValueError(f"expected the directory of an unpacked root file system, found {os.fspath(path)!r}")
    digest = hashlib.sha256()
    for name, status in entries(root):
        size = status.st_size if stat.S_ISREG(status.st_mode) else 0
        link = os.readlink(root / name) if stat.S_ISLNK(status.st_mode) else ""
        digest.update(f"{name}\0{status.st_mode:o}\0{size}\0{link}\n".encode(errors="surrogateescape"))
    return RootFS(f"directory:{digest.hexdigest()[:32]}", (root,))


def host(*, extra_binds: Sequence[tuple[Path, str]] = (), packages: Sequence[str] | None = None) -> RootFS:
    """Root file system of this machine's tool chain.

    Args:
        extra_binds: more of the host to show read-only, as (host path, path inside).
        packages: distributions for the Python inside, taken from this process's, with what they require; by default
            pytest, if it is installed.

    Raises:
        SandboxUnavailable: not Linux, no bash, or a package that is not installed.
    """
    if sys.platform != "linux":
        raise SandboxUnavailable("the host's tool chain can be put under a sandbox on Linux only: use a Docker image")
    with contextlib.ExitStack() as stack:
        asked = _asked(stack)  # they answer while all else is looked up
        distributions = _distributions(packages)
        visible = _tool_chain()
        _check_visible(visible)
        hidden = [(path, str(path)) for path in _hidden(visible)]
        certificates = [(Path(path), path) for path in _CERTIFICATES if os.path.isdir(path)]
        versions = _versions(distributions, asked)
    links = {name: os.readlink(f"/{name}") for name in _TOP if os.path.islink(f"/{name}")}
    inside = [*(str(path) for path in visible), *(to for _, to in (*certificates, *extra_binds))]
    known = [versions, links, inside, _ETC, [_digest(Path("/etc", name)) for name in _ETC_COPIED]]
    folder = _cache() / f"host-{hashlib.sha256(json.dumps(known).encode()).hexdigest()[:24]}"
    _once(folder, lambda target: _make_host(target, links, inside, distributions, extra_binds))
    empty = folder / "empty"
    binds = [*((path, str(path)) for path in visible), *((empty, to) for _, to in hidden), *certificates, *extra_binds]
    identity = hashlib.sha256(json.dumps(versions).encode()).hexdigest()[:32]
    return RootFS(f"host:{identity}", (folder / "root",), tuple(binds), {"PATH": _PATH})


def image(name: str) -> RootFS:
    """Root file system of a Docker image that is on this machine.

    Its layers are not held: they go if the image is removed.

    Raises:
        SandboxUnavailable: no daemon, no permission, or no such image; the message says what to do.
    """
    from sandboxgym.sandbox.docker.client import connect, image_attributes, quick_attributes

    attributes = quick_attributes(name)
    lowers = _layers(attributes) if attributes is not None else ()
    if attributes is None or not lowers:
        client = connect()
        try:
            attributes = image_attributes(client, name)
            lowers = _layers(attributes) or (_unpacked(client, attributes["Id"]),)
        finally:
            client.close()
    config = attributes.get("Config") or {}
    env = dict(entry.partition("=")[::2] for entry in config.get("Env") or [])
    return RootFS(attributes["Id"], lowers, (), env, config.get("WorkingDir") or "/")


def _layers(attributes: dict[str, Any]) -> tuple[Path, ...]:
    """Layers in the daemon's storage, topmost first; empty if they cannot be used from here."""
    driver = attributes.get("GraphDriver") or {}
    place = driver.get("Data") or {}  # none with containerd's image store
    if driver.get("Name") != "overlay2" or os.geteuid() != 0 or "UpperDir" not in place:
        return ()
    folders = [place["UpperDir"], *filter(None, place.get("LowerDir", "").split(":"))]
    usable = all(os.path.isdir(folder) for folder in folders)  # not those of a daemon in a virtual machine
    return tuple(Path(folder) for folder in folders) if usable else ()


def _unpacked(client: Any, image_id: str) -> Path:
    target = _cache() / "images" / image_id.removeprefix("sha256:")
    _once(target, lambda folder: _export(client, image_id, folder))
    return target / "root"


def _export(client: Any, image_id: str, target: Path) -> None:
    from sandboxgym.sandbox.docker.client import daemon_errors

    root = target / "root"
    root.mkdir()
    with daemon_errors():
        container = client.api.create_container(image_id, command=["none"], entrypoint=["none"])["Id"]
        try:
            stream: Any = _Stream(client.api.export(container, chunk_size=1 << 20))
            with tarfile.open(fileobj=stream, mode="r|", errors="surrogateescape") as archive:
                _extract(archive, root)
        finally:
            client.api.remove_container(container, v=True, force=True)


class _Stream:
    """A file object over blocks of bytes."""

    def __init__(self, blocks: Iterable[bytes]) -> None:
        self._blocks = iter(blocks)
        self._rest = b""

    def read(self, size: int) -> bytes:
        parts, wanted = [], size
        while wanted:
            block = self._rest or next(self._blocks, b"")
            if not block:
                break
            parts.append(block[:wanted])
            self._rest = block[wanted:]
            wanted -= len(parts[-1])
        return b"".join(parts)


def _extract(archive: tarfile.TarFile, root: Path) -> None:
    """Unpack an image that the user chose: setuid bits and, as root, owners are kept; nothing is written outside."""
    whole = str(root.resolve())
    owners = os.geteuid() == 0
    # Attributes of the image are kept. Python 3.14 would drop them by default; 3.11.3 and older have no filters.
    archive.extraction_filter = lambda info, path: info
    for info in archive:
        parent = os.path.realpath(os.path.join(whole, os.path.dirname(info.name)))
        if info.name.startswith("/") or ".." in info.name.split("/") or os.path.commonpath([whole, parent]) != whole:
            raise SandboxUnavailable(f"the image holds {info.name!r}, which leaves its root")
        if info.isblk() or info.ischr():
            continue
        if not owners and not info.issym():  # so that the tree can be read and removed by who has it
            info.mode = (info.mode or 0) | stat.S_IRUSR | stat.S_IWUSR | (stat.S_IXUSR if info.isdir() else 0)
        archive.extract(info, whole, numeric_owner=True, set_attrs=True)
        for key, value in info.pax_headers.items():
            if key.startswith("SCHILY.xattr."):
                with contextlib.suppress(OSError):
                    data = value.encode("utf-8", "surrogateescape")
                    os.setxattr(os.path.join(whole, info.name), key[13:], data, follow_symlinks=False)


def _tool_chain() -> list[Path]:
    """Directories of the host to show, none inside another."""
    found = [Path("/usr"), *(Path("/", name) for name in _TOP)]
    found = [path for path in found if path.is_dir() and not path.is_symlink()]
    prefix = Path(sys.base_prefix).resolve()
    if not any(prefix.is_relative_to(path) for path in found):
        found += [prefix / part for part in _PREFIX_PARTS if (prefix / part).is_dir()]
    return found


def _check_visible(visible: Sequence[Path]) -> None:
    program = shutil.which("bash", path=_PATH)
    if program is None:
        raise SandboxUnavailable("the host has no bash in /usr/bin or /bin: install it, or use a Docker image")
    for needed in (program, sys.executable):
        real = Path(needed).resolve()
        if not any(real.is_relative_to(path.resolve()) for path in visible):
            raise SandboxUnavailable(f"{real} lies outside the host's tool chain ({', '.join(map(str, visible))})")


def _hidden(visible: Sequence[Path]) -> list[Path]:
    """Parts of the visible directories to hide, each by an empty directory over it."""
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    prefix, interpreter = Path(sys.base_prefix).resolve(), Path(sys.executable).resolve()
    found = [prefix / lib / version / "site-packages" for lib in ("lib", "lib64")]
    for packages in (path for top in visible for path in _package_folders(top)):
        found += [path for name in _OURS for path in packages.glob(f"{name}*") if path.is_dir()]
    package = Path(__file__).resolve().parents[2]
    found += [package, package.parent / "bpo_ref", data.data_dir(), data.cache_dir()]
    found += [data.directory(dataset) for dataset in data_sets().values()]
    found += [run_directories.runtime_dir(create=False), Path.home(), Path(tempfile.gettempdir())]
    if (package.parent / "pyproject.toml").exists():
        found.append(package.parent)
    if sys.prefix != sys.base_prefix:
        found.append(Path(sys.prefix))
    kept: list[Path] = []
    for path in sorted({path.resolve() for path in found if path.is_dir()}):
        shown = any(path.is_relative_to(top.resolve()) for top in visible) and not interpreter.is_relative_to(path)
        if shown and not any(path.is_relative_to(parent) for parent in kept):
            kept.append(path)
    return kept


def _package_folders(top: Path) -> Iterator[Path]:
    """Package directories of Python installations below a directory such as /usr."""
    for pattern in ("", "lib/", "lib64/", "local/lib/", "local/lib64/"):
        for kind in ("site-packages", "dist-packages"):
            yield from top.glob(f"{pattern}python3*/{kind}")


def _distributions(names: Sequence[str] | None) -> list[importlib.metadata.Distribution]:
    """Distributions and their requirements, each once."""
    if names is None:
        try:
            importlib.metadata.distribution("pytest")
        except importlib.metadata.PackageNotFoundError:
            return []
        names = ("pytest",)
    found: dict[str, importlib.metadata.Distribution] = {}
    pending = list(names)
    while pending:
        name = pending.pop()
        key = name.lower().replace("_", "-")
        if key in found or key in _OURS:
            continue
        try:
            found[key] = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError as error:
            raise SandboxUnavailable(f"the Python of the sandbox needs {name}: pip install {name}") from error
        pending += _required(found[key])
    return [found[key] for key in sorted(found)]


def _required(distribution: importlib.metadata.Distribution) -> list[str]:
    from packaging.requirements import Requirement  # pytest, which is why there are any, requires it

    requirements = [Requirement(line) for line in distribution.requires or []]
    return [need.name for need in requirements if need.marker is None or need.marker.evaluate({"extra": ""})]


def _asked(stack: contextlib.ExitStack) -> dict[str, subprocess.Popen[str]]:
    """Version outputs of programs; the stack waits for them."""
    found = {}
    for program in ("bash", "git"):
        command = shutil.which(program, path=_PATH)
        if command is not None:
            pipe = subprocess.PIPE
            process = subprocess.Popen(
                [command, "--version"], stdout=pipe, stderr=subprocess.DEVNULL, text=True, errors="replace"
            )
            found[program] = stack.enter_context(process)
    return found


def _versions(
    distributions: Sequence[importlib.metadata.Distribution], asked: Mapping[str, subprocess.Popen[str]]
) -> dict[str, str]:
    """Versions that identify the tool chain, equal on machines that are set up equally."""
    found = {f"package {d.metadata['Name']}": d.version for d in distributions}
    found["machine"] = platform.machine()
    found["python"] = sys.version
    found["prefix"] = sys.base_prefix
    with contextlib.suppress(OSError):
        found["system"] = Path("/etc/os-release").read_text(encoding="utf-8", errors="replace")
    for program, process in asked.items():
        found[program] = process.communicate()[0].partition("\n")[0]
    return found


def _make_host(
    target: Path,
    links: dict[str, str],
    inside: Iterable[str],
    distributions: Sequence[importlib.metadata.Distribution],
    extra_binds: Iterable[tuple[Path, str]],
) -> None:
    (target / "empty").mkdir()
    root = target / "root"
    root.mkdir()
    for name, mode in _FOLDERS.items():
        (root / name).mkdir(parents=True)
        (root / name).chmod(mode)
    for name, link in links.items():
        (root / name).symlink_to(link)
    _make_etc(root / "etc")
    files = {to for path, to in extra_binds if not path.is_dir()}
    for path in inside:
        point = root / path.lstrip("/")
        if path in files:
            point.parent.mkdir(parents=True, exist_ok=True)
            point.touch()
        else:
            point.mkdir(parents=True, exist_ok=True)
    _make_python(root / _PYTHON.lstrip("/"), distributions)
    target.chmod(0o755)
    root.chmod(0o755)


def _make_etc(etc: Path) -> None:
    for name, text in _ETC.items():
        (etc / name).write_text(text, encoding="ascii")
    for name in _ETC_COPIED:
        with contextlib.suppress(OSError):
            (etc / name).write_bytes(Path("/etc", name).read_bytes())
    for name in _ETC_FOLDERS:
        if Path("/etc", name).is_dir():
            shutil.copytree(Path("/etc", name), etc / name, symlinks=True)
    (etc / "mtab").symlink_to("/proc/self/mounts")


def _make_python(prefix: Path, distributions: Sequence[importlib.metadata.Distribution]) -> None:
    """Make a virtual environment of the base interpreter with copies of some packages."""
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    base = Path(getattr(sys, "_base_executable", sys.executable)).resolve()
    site = prefix / "lib" / f"python{version}" / "site-packages"
    site.mkdir(parents=True)
    (prefix / "bin").mkdir()
    for name in ("python", "python3", f"python{version}"):
        (prefix / "bin" / name).symlink_to(base)
    settings = f"home = {base.parent}\ninclude-system-site-packages = false\nversion = {platform.python_version()}\n"
    (prefix / "pyvenv.cfg").write_text(settings, encoding="utf-8")
    for distribution in distributions:
        _copy_distribution(distribution, site)
        for script in distribution.entry_points.select(group="console_scripts"):
            _make_script(prefix / "bin" / script.name, script)


def _copy_distribution(distribution: importlib.metadata.Distribution, site: Path) -> None:
    for file in distribution.files or []:
        if ".." in file.parts or "__pycache__" in file.parts or file.suffix == ".pth":
            continue
        source, target = str(distribution.locate_file(file)), site / file
        if not os.path.isfile(source) or file.name == "direct_url.json":  # names a path of the host
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, target)
        copy_attributes(source, str(target), os.stat(source))
        target.chmod(0o644)
        if file.suffix == ".py":
            shown = f"{_PYTHON}/{target.relative_to(site.parents[2])}"
            py_compile.compile(str(target), dfile=shown, quiet=2)


def _make_script(path: Path, script: importlib.metadata.EntryPoint) -> None:
    lines = [f"#!{_PYTHON}/bin/python", "import sys", f"from {script.module} import {script.attr}", ""]
    path.write_text("\n".join([*lines, f"sys.exit({script.attr}())", ""]), encoding="utf-8")
    path.chmod(0o755)


def _digest(path: Path) -> str:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError:
        return ""


def _cache() -> Path:
    return data.cache_dir() / "sandbox"


def _once(target: Path, make: Callable[[Path], None]) -> None:
    """Make a directory of the cache unless it exists.

    Raises:
        SandboxUnavailable: it cannot be written, such as where the disk is full. Nothing is left of it.
    """
    try:
        made_once(target, make, look=lambda: target.is_dir() or None)
    except OSError as error:
        reason = error.strerror or brief(error, 200)
        raise SandboxUnavailable(
            f"the root file system {target} cannot be made: {reason}; set SANDBOXGYM_CACHE to a directory that can be "
            "written and has room"
        ) from error

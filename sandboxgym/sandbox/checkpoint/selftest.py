"""Self-test of CRIU on this kernel: capture a small sandbox and continue with two copies."""

from __future__ import annotations

from typing import Any

from sandboxgym.sandbox.base import RootFS, SandboxError
from sandboxgym.sandbox.checkpoint.criu import CriuError


def round_trip(program: str) -> None:
    """Capture a shell with a variable, a job and an open file; compare it with a copy of it.

    Raises:
        SandboxError: that does not work, and why.
    """
    from sandboxgym.sandbox.base import clean_environment
    from sandboxgym.sandbox.checkpoint import capture
    from sandboxgym.sandbox.checkpoint import restore as revive
    from sandboxgym.sandbox.files.rootfs import resolve
    from sandboxgym.sandbox.overlay.backend import OverlayBackend
    from sandboxgym.sandbox.shell.bash_session import Shell

    rootfs: RootFS = resolve("host")
    env = clean_environment(rootfs)
    backend: Any = OverlayBackend(rootfs, rootless=False)
    backend.keep_processes()
    sibling = backend.sibling()
    try:
        backend.start()
        shell = Shell(backend, env=env)
        shell.execute("probe=kept; sleep 1000 & exec 7</etc/passwd; read -r line <&7", timeout=60.0)
        asked = 'read -r line <&7; echo "$probe $(jobs -p) $line"'
        tree, checkpoint = capture.snapshot(backend, shell, program)
        copy = Shell.restored(
            sibling, revive.fork(sibling, tree, checkpoint.image, program), checkpoint.session, env=env
        )
        answers = [one.execute(asked, timeout=60.0).output for one in (shell, copy)]
        if answers[0] != answers[1] or not answers[0].startswith("kept "):
            raise CriuError(f"expected the same of a sandbox and its copy, found {answers!r}")
        tree.release()
        checkpoint.release()
        for one in (shell, copy):
            one.close()
    except OSError as error:
        raise SandboxError(str(error)) from error
    finally:
        for one_backend in (backend, sibling):
            one_backend.close()

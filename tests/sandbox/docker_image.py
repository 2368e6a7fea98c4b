"""A small Docker image, made of this machine's programs by ``docker import``, because there may be no registry to use.

It holds bash, coreutils, git and a Python with pytest, and is removed at the end of the session.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from components import missing

from sandboxgym.bench.tools.small_image import fill as fill

REPOSITORY = "sandboxgym-test-base"
WORKER = "sandboxgym.test.worker"
"""Label with the process that made an image; images made from it have it too."""
SETTINGS = (
    "ENV PATH=/opt/python/bin:/usr/bin:/bin",
    "ENV IMAGE_SAYS=hello",
    "WORKDIR /root",
    'CMD ["bash"]',
    "LABEL sandboxgym.test=1",
)


@pytest.fixture(scope="session")
def docker_image() -> Iterator[str]:
    """Name of the image; skips where there is no daemon."""
    if shutil.which("docker") is None:
        missing("docker", "there is no docker command")
    answer = subprocess.run(["docker", "info", "--format", "{{.OSType}}"], capture_output=True, text=True)
    if answer.stdout.strip() != "linux":
        missing("docker", f"no Docker daemon for Linux containers: {answer.stderr.strip()}")
    remove_images_of_ended_sessions()
    settings = (*SETTINGS, f"LABEL {WORKER}={os.getpid()}")
    name = f"{REPOSITORY}:{os.getpid()}"
    with tempfile.TemporaryDirectory(prefix="sandboxgym-image-") as folder:
        fill(Path(folder))
        changes = [word for setting in settings for word in ("--change", setting)]
        tar = subprocess.Popen(["tar", "-C", folder, "-c", "."], stdout=subprocess.PIPE)
        subprocess.run(["docker", "import", *changes, "-", name], stdin=tar.stdout, check=True, capture_output=True)
        assert tar.wait() == 0
    yield name
    subprocess.run(["docker", "rmi", "-f", name], check=True, capture_output=True)


def remove_images_of_ended_sessions() -> None:
    listed = subprocess.run(["docker", "images", "--format", "{{.Tag}}", REPOSITORY], capture_output=True, text=True)
    for tag in listed.stdout.split():
        if not Path("/proc", tag).exists():
            subprocess.run(["docker", "rmi", "-f", f"{REPOSITORY}:{tag}"], capture_output=True)
    # One that was still in use when it was removed has lost its name only; one of a living session may not have it yet.
    nameless = ["docker", "images", "-q", "--filter", "dangling=true", "--filter", f"label={WORKER}"]
    for image in set(subprocess.run(nameless, capture_output=True, text=True).stdout.split()):
        maker = ["docker", "inspect", "--format", f'{{{{index .Config.Labels "{WORKER}"}}}}', image]
        pid = subprocess.run(maker, capture_output=True, text=True).stdout.strip()
        if pid and not Path("/proc", pid).exists():
            subprocess.run(["docker", "rmi", image], capture_output=True)

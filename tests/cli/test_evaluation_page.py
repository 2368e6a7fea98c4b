"""The example of docs/evaluate.md is what its command prints."""

from __future__ import annotations

import hashlib
import importlib
import json
import random
import re
import shlex
import sys
from pathlib import Path

from chat_stub import chat_stub

from sandboxgym.cli import main

PAGE = Path(__file__).parents[2] / "docs" / "evaluate.md"
EXAMPLE = re.compile(r"^```console\n\$ (sandboxgym eval (?:[^\n]*\\\n)*[^\n]*)\n(.*?)^```", re.DOTALL | re.MULTILINE)


class DrawsOne:
    """Endpoint that draws one of the listed actions, the same for the same request; one request in seven fails once."""

    def __init__(self) -> None:
        self.failed: set[str] = set()

    def __call__(self, request):
        digest = hashlib.sha256(json.dumps(request, sort_keys=True).encode()).hexdigest()
        if int(digest, 16) % 7 == 0 and digest not in self.failed:
            self.failed.add(digest)
            return 503, {"error": {"message": "busy"}}
        chosen = random.Random(digest).choice(request["messages"][-1]["content"].partition("You can: ")[2].split(", "))
        return f"<action>{chosen}</action>", [-1.0] * 9, []


def test_the_example_of_the_page(tmp_path, monkeypatch, capsys):
    command, shown = EXAMPLE.search(PAGE.read_text(encoding="utf-8")).groups()
    words = shlex.split(command.replace("\\\n", ""))[1:]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path / "boxes" / "src")])
    assert main(["init", "boxes"]) == 0
    importlib.invalidate_caches()  # of the folder that is there now
    capsys.readouterr()
    with chat_stub(DrawsOne()) as stub:
        words[words.index("--base-url") + 1] = f"{stub.url}/v1" if not stub.url.endswith("/v1") else stub.url
        status = main(words)
    captured = capsys.readouterr()
    printed = (captured.out + captured.err).replace(stub.url.removesuffix("/v1"), "http://localhost:8000")
    assert status == 0, printed
    missing = [line for line in shown.splitlines() if line not in printed.splitlines()]
    assert not missing, f"the page has {missing}; this was printed:\n{printed}"

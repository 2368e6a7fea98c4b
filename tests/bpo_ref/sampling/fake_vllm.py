"""A program that is started like vLLM's, with a `FakeServer` around the model in the folder that it is given.

FAKE_VLLM says how it goes wrong: ``broken`` ends while it starts, ``hangs`` never listens, ``stubborn`` cannot be asked
to end. Like vLLM's it has a process of its own, here in another session, which would outlive it.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[3]), str(Path(__file__).parents[1])]


def main(argv: list[str]) -> None:
    assert argv[:3] == ["-m", "vllm.entrypoints.cli.main", "serve"], argv
    folder, options = argv[3], argv[4:]
    kind = os.environ.get("FAKE_VLLM", "")
    print(json.dumps({"options": options, "environment": dict(os.environ)}), flush=True)
    subprocess.Popen(["sleep", "1000"], start_new_session=True)
    if kind == "broken":
        sys.exit("ValueError: no such model")
    if kind == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    while kind == "hangs":
        time.sleep(1)
    # Seconds of a processor, which one that goes wrong before does not take.
    from fake_engine import FakeServer

    from bpo_ref.learning.models import load_policy

    model, tokenizer = load_policy(folder)
    rank = int(options[options.index("--max-lora-rank") + 1]) if "--enable-lora" in options else 0
    (Path(os.environ["TMPDIR"]) / "left").write_text("a temporary file")
    FakeServer(model, tokenizer, rank=rank, socket=options[options.index("--uds") + 1]).thread.join()


if __name__ == "__main__":
    main(sys.argv[1:])

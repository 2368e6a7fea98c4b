"""A program that is started like vLLM's, with a `FakeServer` around the model in the folder that it is given.

FAKE_VLLM says how it goes wrong: ``broken`` ends while it starts, ``hangs`` never listens, ``stubborn`` cannot be asked
to end. Like vLLM's it has a process of its own, here in another session, which would outlive it.

The model is in a fork of the server of forks, which need not import PyTorch for seconds; it ends with this program.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
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
    import forked

    (Path(os.environ["TMPDIR"]) / "left").write_text("a temporary file")
    rank = options[options.index("--max-lora-rank") + 1] if "--enable-lora" in options else "0"
    address = options[options.index("--uds") + 1]
    _ours, theirs = socket.socketpair()  # open until this program ends
    with theirs:
        model = forked.Process([__file__, "model", folder, rank, address], os.environ, theirs.fileno(), 2)
    sys.exit(model.wait())


def serve(folder: str, rank: str, address: str) -> None:
    """Serve the model until the other end of stdout is closed: with the program, however that ends."""
    from fake_engine import FakeServer

    from bpo_ref.learning.models import load_policy

    threading.Thread(target=lambda: (os.read(1, 1), os._exit(0)), daemon=True).start()
    FakeServer(*load_policy(folder), rank=int(rank), socket=address).thread.join()


if __name__ == "__main__":
    if sys.argv[1] == "model":
        serve(*sys.argv[2:])
    else:
        main(sys.argv[1:])

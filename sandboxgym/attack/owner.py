"""An owner of sandboxes that may be starved or killed: ``python -m sandboxgym.attack.owner`` takes one task per line.

It makes a sandbox of its own for each, so that harm to it affects no other process. It answers with one line of JSON.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback

from sandboxgym.attack.attempt import NotApplicable
from sandboxgym.attack.stage import Stage

HOLD = "hold"
"""Task after which the owner waits to be killed."""


def grown() -> int:
    """Peak memory of this process in bytes since `forget_peak`."""
    with open("/proc/self/status", encoding="ascii") as file:
        return next((int(line.split()[1]) * 1024 for line in file if line.startswith("VmHWM:")), 0)


def forget_peak() -> None:
    """Reset the peak of memory."""
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")


def main() -> None:
    """Perform the task in each line of standard input."""
    from sandboxgym.attack import leftovers, starvation

    backend, image = sys.argv[1], sys.argv[2] or None
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    stage = Stage(backend, image=image)
    print(json.dumps({"verdict": "ready", "detail": ""}), file=out, flush=True)
    try:
        for line in sys.stdin:
            task, _, name = line.strip().partition(" ")
            if task == HOLD:
                print(json.dumps(leftovers.prepare(stage, name)), file=out, flush=True)
                time.sleep(600)
            print(json.dumps(_starved(stage, starvation, name)), file=out, flush=True)
    finally:
        stage.close()


def _starved(stage: Stage, starvation: object, name: str) -> dict[str, object]:
    forget_peak()
    before, began = grown(), time.monotonic()
    try:
        detail = starvation.TASKS[name].run(stage)  # type: ignore[attr-defined]
        verdict = "done"
    except NotApplicable as error:
        verdict, detail = "not applicable", str(error)
    except starvation.Passed as error:  # type: ignore[attr-defined]
        verdict, detail = "passed", str(error)
    except BaseException as error:  # an untyped one is what the attack was for
        where = traceback.extract_tb(error.__traceback__)[-1]
        verdict, detail = "untyped", f"{type(error).__name__}: {error} ({os.path.basename(where.filename)})"[:300]
    return {"verdict": verdict, "detail": detail, "bytes": grown() - before, "seconds": time.monotonic() - began}


if __name__ == "__main__":
    main()

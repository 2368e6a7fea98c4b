"""Trains by arguments in JSON (the first on the command line) and kills itself in the middle of an update (the second).

Not for a fork of the tests' own process: PyTorch's gradients do not survive a fork of threads that have run.
"""

from __future__ import annotations

import json
import os
import signal
import sys

from bpo_ref.args import Args
from bpo_ref.train import Trainer
from sandboxgym.tree import RolloutTree

if __name__ == "__main__":
    trainer = Trainer(Args(**json.loads(sys.argv[1])))
    optimize = trainer._optimize

    def die(trees: list[RolloutTree]) -> dict[str, float]:
        if trainer.session.step == int(sys.argv[2]):
            os.kill(os.getpid(), signal.SIGKILL)
        return optimize(trees)

    trainer._optimize = die  # type: ignore[method-assign]
    trainer.run()

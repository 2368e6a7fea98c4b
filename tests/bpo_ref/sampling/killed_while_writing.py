"""Trains by arguments in JSON (the first on the command line) and kills itself in the middle of a file of weights.

The second argument is the number of the update whose weights they are, from 0.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from bpo_ref.args import Args
from bpo_ref.train import Trainer

if __name__ == "__main__":
    trainer = Trainer(Args(**json.loads(sys.argv[1])))
    save = PreTrainedModel.save_pretrained

    def half(self: Any, folder: Path, **options: Any) -> None:
        save(self, folder, **options)
        if folder.parent.name == "served" and trainer.session.step == int(sys.argv[2]):
            path = folder / "model.safetensors"
            os.truncate(path, path.stat().st_size // 2)
            os.kill(os.getpid(), signal.SIGKILL)

    PreTrainedModel.save_pretrained = half
    trainer.run()

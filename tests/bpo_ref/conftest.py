"""Makes ``tabular`` importable, and keeps PyTorch to one thread: the machine is shared by the test processes."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))
torch.set_num_threads(1)

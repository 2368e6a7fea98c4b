"""Make ``tabular`` importable, and keep PyTorch to one thread: test processes share the machine."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))
torch.set_num_threads(1)

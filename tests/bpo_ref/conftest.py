"""Keep PyTorch to one thread: test processes share the machine."""

from __future__ import annotations

import torch

torch.set_num_threads(1)

"""`SnapshotVectorEnv`: many environments stepped together, each of which can be snapshotted, restored and forked.

1. All modes (this thread, threads, processes, a Ray cluster) give exactly equal transitions for equal seeds.
2. No environment resets by itself (unless ``autoreset=True``): a finished one can be restored and continues from there.
   Gymnasium's own vector environments discard the next action then; its ``AsyncVectorEnv`` returns stale ``Text``
   observations under its default shared memory. Here every observation is the one the environment returned.
3. One environment that fails, hangs or dies does not stop the others: it is reported and its episode truncated.
4. The environments of a worker that died return to their last snapshot (taken or restored here).

The class is a ``gymnasium.vector.VectorEnv`` with ``AutoresetMode.DISABLED``, whose ``reset`` and ``step`` take a mask.
"""

from __future__ import annotations

from sandboxgym.workers.vector.env import EpisodeOver, NotEnoughIdle, SnapshotVectorEnv

__all__ = ["EpisodeOver", "NotEnoughIdle", "SnapshotVectorEnv"]

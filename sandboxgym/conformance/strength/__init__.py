"""Strength of a certificate: the share of faults put into the user's own environment that its checks detect.

1. The faults are generic: a restore leaves out one field of the captured state, makes it coarser, shares it with the
   environment instead of copying it, or leaves a random stream or a wrapper unrestored; a snapshot is one step old.
2. The fields are those of the value that ``_capture`` returns; for an environment that is not a `SnapshotEnv`, the
   attributes that change during play. Only behaviour decides: a fault is caught when a check that the certificate
   passed fails with it.
3. A field that was equal in all snapshots is not exercised, whatever the checks do: that is reported without a trial. A
   fault that changed nothing when it was tried is no fault, and is not counted.
4. It ends within a given processor time; trials not made by then are listed.
"""

from __future__ import annotations

from sandboxgym.conformance.strength.measurement import LEAST_SECONDS, SHARE, measure
from sandboxgym.conformance.strength.trials import Strength, Trial

__all__ = ["LEAST_SECONDS", "SHARE", "Strength", "Trial", "measure"]

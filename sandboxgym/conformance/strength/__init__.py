"""Strength of a certificate: the share of faults put into the user's own environment that its checks detect.

1. The faults are generic. A restore omits one field of the captured state, makes it coarser, shares it with the
   environment instead of copying it, or does not restore a random stream or a wrapper; or a snapshot is one step old.
2. The fields are those of the value that ``_capture`` returns. For an environment that is not a `SnapshotEnv`, they are
   the attributes that change during play. Only behaviour decides: a fault is caught if a check that passed for the
   certificate fails with the fault.
3. A field that was equal in all snapshots cannot be exercised by any check; it is reported without a trial. A fault
   that changed nothing when it was tried is not counted.
4. The trials have a time limit, which is doubled once if fields are undecided; faults not tried by then are listed.
"""

from __future__ import annotations

from sandboxgym.conformance.strength.measurement import LEAST_SECONDS, SHARE, measure
from sandboxgym.conformance.strength.trials import Strength, Trial

__all__ = ["LEAST_SECONDS", "SHARE", "Strength", "Trial", "measure"]

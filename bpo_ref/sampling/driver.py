"""Driver of a run's rollouts (``--driver``): all paths in lockstep, or every path by itself."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Literal

from sandboxgym.tree import EnvSource, RolloutTree, Schedule, rollout, rollout_async

if TYPE_CHECKING:
    from bpo_ref.args import Args

DriverName = Literal["auto", "lockstep", "async"]


def only_lockstep(args: Args) -> str:
    """Reason why the paths of a run cannot advance by themselves; empty if they can.

    Args:
        args: settings with the preset filled in.
    """
    if args.backend != "vllm":
        return f"backend={args.backend} samples in this process, a turn of all paths at once"
    if args.schedule == "value-oracle":
        return "schedule=value-oracle gives the forks of its probes numbers of their own"
    several = args.forks in ("roots", "all") and (args.roots or 1) > 1
    if args.root_branch == "free" and several and args.schedule not in ("none", "mc", "split"):
        return f"with root_branch=free and forks={args.forks} the first path to ask for it gets the fork at the root"
    return ""


def by_itself(args: Args) -> bool:
    """True if every path of a run advances by itself."""
    return args.driver == "async" or (args.driver == "auto" and not only_lockstep(args))


def driver_line(args: Args) -> str:
    """Sentence for the log about the driver of a run that samples on servers; empty for other runs."""
    if args.backend != "vllm":
        return ""
    if by_itself(args):
        rest = "; env_overlap changes nothing" if args.env_overlap else ""
        return f"{'driver':<12} async: every path asks the servers by itself{rest}"
    reason = only_lockstep(args) if args.driver == "auto" else "as set"
    return f"{'driver':<12} lockstep: every turn waits for its slowest path ({reason})"


def roll_out(
    envs: EnvSource, policy: Any, schedule: Schedule, *, by_itself: bool, overlap: bool = False, **options: Any
) -> list[RolloutTree]:
    """Roll out trees with either driver: the same ones.

    Args:
        envs: as for `rollout`.
        policy: an `AsyncPolicy` if paths advance by themselves, else a `Policy`.
        schedule: as for `rollout`.
        by_itself: whether every path advances by itself.
        overlap: as for `rollout`; without meaning for paths that advance by themselves.
        **options: of `rollout` and `rollout_async`.
    """
    if not by_itself:
        return rollout(envs, policy, schedule, overlap=overlap, **options)
    return asyncio.run(rollout_async(envs, policy, schedule, **options))

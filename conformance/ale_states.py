"""Atari with the emulator's own states, for comparison: how faithful ``clone_state`` and ``restore_state`` are.

    PYTHONPATH=conformance python -m sandboxgym.conformance ale_states:breakout

This is the straightforward implementation: a snapshot is ``env.unwrapped.clone_state(include_rng=True)``; a restore
calls ``restore_state`` and reads the screen. Wrappers, spaces and the environment's counters are not part of such a
state. It needs ``ale-py``.
"""

from __future__ import annotations

from typing import Any, ClassVar

import gymnasium as gym

from sandboxgym import ResetNeeded, SnapshotReleased, SnapshotSpec

Output = tuple[Any, dict[str, Any]]


class Handle:
    """A state of the emulator."""

    def __init__(self, state: Any) -> None:
        self.state = state

    def release(self) -> None:
        self.state = None


class Atari(gym.Env[Any, int]):
    """A game under Gymnasium's usual wrappers, snapshotted by the emulator."""

    snapshot_spec: ClassVar[SnapshotSpec] = SnapshotSpec(kind="memory", cross_process=False, cross_host=False)

    def __init__(self, id: str, **kwargs: Any) -> None:
        import ale_py  # optional

        gym.register_envs(ale_py)
        self.arguments = {"id": id, **kwargs}
        self.env = gym.make(**self.arguments)
        self.metadata, self.spec, self.render_mode = self.env.metadata, self.env.spec, self.env.render_mode
        self.action_space, self.observation_space = self.env.action_space, self.env.observation_space
        self.started = False

    @property
    def emulator(self) -> Any:
        return self.env.unwrapped

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Output:
        self.started = True
        return self.env.reset(seed=seed, options=options)

    def step(self, action: int) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        return self.env.step(action)

    def render(self) -> Any:
        return self.env.render()

    def close(self) -> None:
        self.env.close()

    def snapshot(self) -> Handle:
        if not self.started:
            raise ResetNeeded("there is no game yet: call reset() first")
        return Handle(self.emulator.clone_state(include_rng=True))

    def restore(self, snap: Handle, *, seed: int | None = None) -> Output:
        if not isinstance(snap, Handle):
            raise TypeError(f"expected a state of the emulator, found {type(snap).__qualname__}")
        if snap.state is None:
            raise SnapshotReleased("this state was released")
        if not self.started:
            self.reset()
        self.emulator.restore_state(snap.state)
        if seed is not None:
            self.emulator.np_random, _ = gym.utils.seeding.np_random(seed)
        return self.emulator._get_obs(), self.emulator._get_info()

    def fork(self, k: int, *, seed: int | None = None) -> list[Atari]:
        if k < 1:
            raise ValueError(f"expected at least 1 fork, found k={k}")
        snap = self.snapshot()
        children = [Atari(**self.arguments) for _ in range(k)]
        for index, child in enumerate(children):
            child.restore(snap, seed=None if seed is None else seed + index)
        return children


def breakout() -> Atari:
    """Breakout by its memory (128 bytes), with sticky actions, as it is registered otherwise."""
    return Atari("ALE/Breakout-v5", obs_type="ram")

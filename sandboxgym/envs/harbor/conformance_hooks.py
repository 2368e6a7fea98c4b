"""Hooks of `HarborEnv` for the conformance suite: an agent's actions, and access to its shell.

HOOKS=sandboxgym.envs.harbor.conformance_hooks
python -m sandboxgym.conformance sandboxgym/Harbor-v0 --hook actions=$HOOKS:actions --hook shell=$HOOKS:shell \
    --hook limits=$HOOKS:limits
"""

from __future__ import annotations

from sandboxgym.sandbox.agent.player import PATIENCE as PATIENCE
from sandboxgym.sandbox.agent.player import limits as limits
from sandboxgym.sandbox.agent.player import player
from sandboxgym.sandbox.agent.player import shell as shell

actions = player(
    "cd /app && pwd",
    "cat > /etc/motd <<< welcome; cat /etc/motd",
)

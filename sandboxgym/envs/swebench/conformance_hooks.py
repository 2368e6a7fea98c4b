"""Hooks of `SWEBenchEnv` for the conformance suite: an agent's actions, and access to its shell.

HOOKS=sandboxgym.envs.swebench.conformance_hooks
python -m sandboxgym.conformance sandboxgym/SWEBench-v0 --hook actions=$HOOKS:actions --hook shell=$HOOKS:shell \
    --hook limits=$HOOKS:limits
"""

from __future__ import annotations

from sandboxgym.sandbox.agent.player import PATIENCE as PATIENCE
from sandboxgym.sandbox.agent.player import limits as limits
from sandboxgym.sandbox.agent.player import player
from sandboxgym.sandbox.agent.player import shell as shell

actions = player(
    "git status --short | head -n 20",
    "git log --oneline | head -n 3",
    "cd /testbed && pwd",
    "git add -A; git diff --cached --stat | tail -n 1",
    "git checkout -q .; echo $?",
    "sed -i '1s/^/# seen\\n/' README.md; head -n 1 README.md",
    'python3 -c "print(sum(range(10)))"',
)

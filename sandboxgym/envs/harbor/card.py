"""Card of the environment of Harbor tasks: its system prompt and caches, known before the environment is made."""

from __future__ import annotations

from sandboxgym.task_env import EnvCard

CARD = EnvCard(
    title="Harbor",
    system_prompt="""You work in a Linux container, through a tool that the task introduces. One action a turn, of the
kind that it asks for; a command may have several lines. Look before you change, check what you did, and submit when you
are done.""",
    caches={"harbor": "images of tasks that were built without a Docker daemon"},
    extra="sandbox",
    module="pexpect",
    ready="embedded tasks",
    sandboxed=True,
    step_seconds=900.0 + 600.0,  # a command, and the tests, where the task does not say how long
    images="sandboxgym.envs.harbor.tasks:images",
)

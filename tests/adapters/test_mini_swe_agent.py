"""mini-swe-agent's own agent, with a scripted model, in a sandbox: it runs, fails, submits, and goes on in forks."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
from components import missing

from sandboxgym.adapters.mini_swe_agent import SandboxEnvironment


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    monkeypatch.setenv("MSWEA_SILENT_STARTUP", "1")
    monkeypatch.setenv("MSWEA_GLOBAL_CONFIG_DIR", str(tmp_path / "config"))
    try:
        import minisweagent.agents.default
        import minisweagent.environments
        import minisweagent.models.test_models
    except ImportError:
        missing("mini-swe-agent", "the package mini-swe-agent is not installed")
    return minisweagent


def model(library: Any, *commands: str) -> Any:
    made = library.models.test_models
    outputs = [made.make_output("I run it.", [{"command": command}], cost=0.0) for command in commands]
    return made.DeterministicModel(outputs=outputs, cost_per_call=0.0)


def agent(library: Any, env: Any, *commands: str) -> Any:
    prompts = {"system_template": "You are on {{system}}.", "instance_template": "{{task}}"}
    return library.agents.default.DefaultAgent(model(library, *commands), env, **prompts)


SUBMIT = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT; cat ~/notes"


def test_an_agent_works_in_a_sandbox_and_submits(library: Any, tmp_path: Path) -> None:
    spec = "sandboxgym.adapters.mini_swe_agent.SandboxEnvironment"
    config = {"environment_class": spec, "allow_unsafe": True, "timeout": 5}
    env = library.environments.get_environment(config)
    run = agent(library, env, "echo $((6 * 7)) > ~/notes; cd /; X=1", "sleep 60", "exit 3", 'echo "<$X>"', SUBMIT)
    run.config.output_path = tmp_path / "trajectory.json"
    assert run.run("Write a number.") == {"exit_status": "Submitted", "submission": "42\n"}
    said = "\n".join(str(message["content"]) for message in run.messages)
    assert "You are on Linux." in said and "The command was killed after 5 seconds" in said
    assert "<returncode>3</returncode>" in said and "<>" in said
    assert spec in (tmp_path / "trajectory.json").read_text()
    env.sandbox.close()
    assert "could not be run" in env.execute({"command": "true"})["exception_info"]


@pytest.mark.parametrize("command", ["echo a\0b", "echo \ud800", None, 5, ["ls"], {"a": 1}])
def test_what_cannot_be_a_command_is_told_to_the_agent(command: object) -> None:
    env = SandboxEnvironment(allow_unsafe=True)
    told = env.execute({"command": command})
    assert told["returncode"] == -1 and told["exception_info"].startswith("The command could not be run: ")
    assert env.execute({"command": "echo still here"})["output"] == "still here\n"
    env.sandbox.close()


def test_forks_of_an_agent_in_the_middle_end_differently(library: Any) -> None:
    env = SandboxEnvironment(allow_unsafe=True)
    run = agent(library, env, "echo one > ~/notes", "")
    run.add_messages({"role": "system", "content": ""}, {"role": "user", "content": ""})
    run.step()
    ends = []
    for number, child in enumerate(env.fork(2)):
        other = agent(library, child, f"echo {number} >> ~/notes", SUBMIT)
        other.messages = copy.deepcopy(run.messages)
        other.step()
        with pytest.raises(library.exceptions.Submitted) as submitted:
            other.step()
        ends.append(submitted.value.messages[0]["extra"]["submission"])
        child.sandbox.close()
    assert ends == ["one\n0\n", "one\n1\n"]
    assert env.execute({"command": "cat ~/notes"})["output"] == "one\n"
    env.sandbox.close()

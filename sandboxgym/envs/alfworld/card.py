"""Card of ALFWorld: its system prompt and data set, known before the environment is made."""

from __future__ import annotations

from sandboxgym.data import DataFile, DataSet
from sandboxgym.task_env import EnvCard

_RELEASES = "https://github.com/alfworld/alfworld/releases/download"


def _each(name: str) -> tuple[str, ...]:
    """Pattern of a file that is in every trial's directory, split/task/trial/."""
    return (f"json_2.1.1/*/*/*/{name}", f"*/*/*/{name}")


GAMES = DataSet(
    "alfworld",
    "the 4,027 official games (games=train, valid_train, valid_seen, valid_unseen)",
    "MIT (ALFWorld, ALFRED)",
    {
        "games": (
            DataFile(
                "json_2.1.2_tw-pddl.zip",
                f"{_RELEASES}/0.4.0/json_2.1.2_tw-pddl.zip",
                holds=_each("game.tw-pddl"),
            ),
        ),
        "annotations": (
            DataFile(
                "json_2.1.1_json.zip",
                f"{_RELEASES}/0.2.2/json_2.1.1_json.zip",
                holds=_each("traj_data.json"),
            ),
        ),
        "pddl": (
            DataFile(
                "json_2.1.1_pddl.zip",
                f"{_RELEASES}/0.2.2/json_2.1.1_pddl.zip",
                holds=_each("initial_state.pddl"),
            ),
        ),
    },
    {
        "games": "game.tw-pddl files: all that sandboxgym reads",
        "annotations": "traj_data.json files, which the original engine's loader asks for",
        "pddl": "initial states, which only the original's tools read",
    },
    variable="ALFWORLD_DATA",
    check="sandboxgym.envs.alfworld.games.library:check_data",
)
CARD = EnvCard(
    title="ALFWorld",
    system_prompt="""You are in a house that is described to you in words, and have a task to do in it. One command a
turn: go to X, open X, close X, take Y from X, move Y to X, clean Y with X, heat Y with X, cool Y with X, use X,
examine X, look, inventory.
X is a place and Y a thing, each called as it was shown to you, with its number, such as "cabinet 3". You can reach
only the place that you went to last, and carry one thing. What cannot be done has no effect.""",
    data_sets=(GAMES,),
    caches={"alfworld": "compiled games"},
    ready="embedded games; no download, no GPU",
    probes="sandboxgym.envs.alfworld.doctor:PROBES",
)

"""Card of SWE-bench: its system prompt, data set, extra and caches, known before the environment is made."""

from __future__ import annotations

from sandboxgym.data import DataFile, DataSet
from sandboxgym.task_env import EnvCard

_HUB = "https://huggingface.co/datasets/princeton-nlp"


def _rows(name: str, repository: str) -> tuple[DataFile, ...]:
    url = f"{_HUB}/{repository}/resolve/main/data/test-00000-of-00001.parquet"
    return (DataFile(f"{name}.parquet", url, other_names=(f"{name}.jsonl", f"{name}.json")),)


ROWS = DataSet(
    "swebench",
    "SWE-bench rows (issue, commit, tests, gold patch); `sandboxgym swebench images` gets container images",
    "MIT (SWE-bench); each repository has its own",
    {
        "verified": _rows("verified", "SWE-bench_Verified"),
        "lite": _rows("lite", "SWE-bench_Lite"),
        "full": _rows("full", "SWE-bench"),
    },
    {
        "verified": "500 rows that people checked (about 2 MB)",
        "lite": "300 rows",
        "full": "2,294 rows of the test split",
    },
)
CARD = EnvCard(
    title="SWE-bench",
    system_prompt="""You are a programmer at work in a repository, through a tool that the task introduces. One action a
turn, of the kind that it asks for; a command may have several lines. Look before you change, run what you changed, and
submit when you are done.""",
    data_sets=(ROWS,),
    caches={"swebench": "prepared tasks"},
    extra="swebench",
    module="swebench",
    ready="embedded tasks",
    sandboxed=True,
    step_seconds=60.0 + 2 * 1800.0,  # a command; the tests of work that was submitted, and once more as a check
    probes="sandboxgym.envs.swebench.doctor:PROBES",
    images="sandboxgym.envs.swebench.rows.tasks:images",
    clear_cache="sandboxgym.envs.swebench.workspaces.prepared:clear",
)

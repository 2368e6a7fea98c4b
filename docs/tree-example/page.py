"""A hook of MkDocs: the site's live page of rollout trees, made at each build from the trees in this folder.

They are of a run of ``sandboxgym train --config alfworld-tiny --sft-steps 500 --sft-episodes 2500 --updates 20
--eval-every 5 --prompts 8 --eval-episodes 24``: two of the eight trees that it kept at each evaluation, chosen because
their paths end differently; numbers have five digits.
"""

from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

from sandboxgym.tree.files import files_of_run, read_trees
from sandboxgym.tree.page import page_of_updates

TITLE = "BPO on ALFWorld, a tiny model"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the page."""
    text = page_of_updates([read_trees(file) for file in files_of_run(Path(__file__).parent)], title=TITLE)
    files.append(File.generated(config, "tree-example/index.html", content=text))
    return files

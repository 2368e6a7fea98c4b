"""A compact reference trainer for LLM policies on environments that can be forked."""

import sys
from importlib.util import find_spec

_NEEDED = ("torch", "transformers", "accelerate", "tyro", "yaml", "tqdm", "matplotlib")

if _missing := [name for name in _NEEDED if find_spec(name) is None]:
    _said = f"bpo_ref needs {', '.join(_missing)}: pip install 'sandboxgym[train]'"
    if sys.argv[0] == "-m":  # while Python looks for the module of `python -m bpo_ref.train`: no traceback
        sys.exit(_said)
    raise ModuleNotFoundError(_said, name=_missing[0])

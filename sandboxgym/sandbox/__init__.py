"""Process sandboxes that are snapshotted, restored and forked: overlay layers, Docker, plain copies.

>>> from sandboxgym.sandbox import make_sandbox
>>> with make_sandbox("copy", allow_unsafe=True) as sandbox:
...     before = sandbox.snapshot()
...     _ = sandbox.execute("cd /; export PET=cat")
...     sandbox.restore(before)
...     print(sandbox.execute("echo [$PET]").output)
[]
<BLANKLINE>
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sandboxgym.sandbox.base import Limits, Result, SandboxError
    from sandboxgym.sandbox.sandbox import Sandbox, make_sandbox
    from sandboxgym.sandbox.snapshot import SandboxSnapshot

__all__ = ["Limits", "Result", "Sandbox", "SandboxError", "SandboxSnapshot", "make_sandbox"]
_MODULES = {"Limits": "base", "Result": "base", "SandboxError": "base", "SandboxSnapshot": "snapshot"}


def __getattr__(name: str) -> Any:
    from importlib import import_module

    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES.get(name, 'sandbox')}"), name)

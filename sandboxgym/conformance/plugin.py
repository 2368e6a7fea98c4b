"""The plugin `sandboxgym_pytest` under the name by which installations load it that were made before it moved there."""

from sandboxgym_pytest import *  # noqa: F403

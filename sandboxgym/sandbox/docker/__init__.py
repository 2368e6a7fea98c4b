"""The ``docker`` backend: containers of the local daemon."""

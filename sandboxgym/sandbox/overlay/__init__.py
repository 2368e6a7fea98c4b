"""The ``overlay`` backend: Linux namespaces over an overlay file system, as root or as an ordinary user."""

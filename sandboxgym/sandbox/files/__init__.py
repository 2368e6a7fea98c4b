"""File systems of sandboxes: roots, archives, exact copies, files that hold names."""

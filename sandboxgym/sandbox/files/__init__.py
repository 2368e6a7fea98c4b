"""File systems of sandboxes: roots, archives, exact copies, files of name resolution."""

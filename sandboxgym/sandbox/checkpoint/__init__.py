"""Running processes captured and restored with CRIU."""

"""The persistent bash of a sandbox: sessions, state as plain data, terminal output, single commands."""

"""The service of `sandboxgym serve e2b`: the sandboxes of this machine for clients of E2B."""

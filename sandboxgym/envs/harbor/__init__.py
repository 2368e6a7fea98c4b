"""Tasks in the format of Harbor and Terminal-Bench 2 as an environment that forks."""

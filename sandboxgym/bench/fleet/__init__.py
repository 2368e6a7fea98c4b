"""Environments on a cluster: costs of steps, forks and losses here, and what follows for clusters of other sizes."""

"""Environments on a cluster: what a step, a fork and a loss cost here, and what follows for clusters that are not here."""

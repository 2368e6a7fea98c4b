"""Algorithms of this package in other trainers."""

"""Thin adapters to other libraries, one module each, so that unused libraries are never imported."""

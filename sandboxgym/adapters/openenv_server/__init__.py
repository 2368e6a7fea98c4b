"""Environments behind the protocol of OpenEnv: sessions, messages, endpoints, the application."""

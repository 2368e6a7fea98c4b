"""The E2B backend: sandboxes of a service with E2B's API."""

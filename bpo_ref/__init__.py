"""A compact reference trainer for LLM policies on environments that can be forked."""

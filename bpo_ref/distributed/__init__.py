"""Weights spread over processes: FSDP2, and ZeRO-3 by DeepSpeed."""

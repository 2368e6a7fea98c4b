"""Environments in other threads and processes: `RemoteEnv`, `EnvPool`, `SnapshotVectorEnv`."""

"""The official verdict on a patch, and signs of a forged one."""

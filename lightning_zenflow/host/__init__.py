"""The host half: shared arena, worker processes and their AdamW. Knows the OS; no GPU, no Lightning."""

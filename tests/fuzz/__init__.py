"""A seeded fuzzer of damaged and hostile checkpoints."""

"""Data parallelism around a pipeline: FSDP2 shards, replicas, tied weights, and the gradient norm."""

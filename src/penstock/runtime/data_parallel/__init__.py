"""What a pipeline does together with its replicas: sharding, reduction, tied weights, norms."""

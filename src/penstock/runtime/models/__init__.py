"""Models split into pipeline stages, and their initialization."""

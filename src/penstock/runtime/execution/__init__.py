"""A rank's list at work: stages, microbatches, programs and their connections."""

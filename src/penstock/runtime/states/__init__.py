"""State files of ranks, for `penstock diagnose`: written when a step fails or stalls, and on SIGUSR1."""

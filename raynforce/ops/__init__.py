"""Where runs go when one machine is not enough: clusters as files, and runs as jobs."""

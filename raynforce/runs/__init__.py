"""What a run leaves behind: its directory, checkpoints, metric sinks, and the progress it shows while it lasts."""

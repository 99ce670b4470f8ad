"""RLlib as an engine: its algorithms train, all around them is ours. `names` tells which files need RLlib."""

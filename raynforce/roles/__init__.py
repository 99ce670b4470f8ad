"""What a process can be: plain classes with `state()` and `load()`, which know nothing of processes."""

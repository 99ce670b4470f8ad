"""Roles as Ray actors: the runtime, and the Ray it runs on, started here or joined."""

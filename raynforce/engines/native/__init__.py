"""The native engine: the loop of a topology over roles in a runtime."""

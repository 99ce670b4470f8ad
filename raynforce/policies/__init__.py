"""How an observation becomes an action: network specs, their torch and numpy interpreters, distributions."""

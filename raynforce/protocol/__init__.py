"""How env hosts and a central policy talk (docs/protocol.md): versioned, plain data, over any transport."""

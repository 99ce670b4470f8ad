"""Where experience comes from: making, describing, vectorising and checking gymnasium environments."""

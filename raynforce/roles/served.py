"""What an env host says when it serves no more; light, because the driver reads it in every run."""

JOINED = "joined"
"""The policy lives in the same process, and asks for what it wants."""
GROWN = "has grown to "
"""With how much memory its process has, which is too much: it is to be replaced."""

"""What was seen: fragments of experience, advantages and returns computed from them, replay."""

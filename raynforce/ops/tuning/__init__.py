"""The search for settings: trials on Ray Tune, each of them ordinary runs in one directory."""

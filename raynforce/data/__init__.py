"""Recorded episodes: in memory (`episodes.py`), in files (`parquet.py`, `minari_files.py`), by name (`files.py`)."""

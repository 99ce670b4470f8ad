"""Who talks to whom: one file each, the loop in plain order."""

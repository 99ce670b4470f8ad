"""Pictures and pages of runs that need no server: `plot`, `report` and `export_metrics` read run directories."""

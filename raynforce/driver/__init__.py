"""One run, seen from the process that was started for it: begin, rounds, report, evaluate, checkpoint, finish."""

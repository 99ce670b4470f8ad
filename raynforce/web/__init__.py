"""`raynforce watch`: a page that shows runs as they go. It reads run directories and never talks to a driver."""

"""One file per view; each has `show`."""

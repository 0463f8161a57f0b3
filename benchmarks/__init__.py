"""Speed: each script measures side by side in one run, prints a table and writes flat JSON."""

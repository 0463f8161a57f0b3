"""One thin Prefect task a stage: find or make its output, and show it in the UI. The work is in `torchspec_core`."""

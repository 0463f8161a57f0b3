"""What runs, in which order. A flow is something a person starts, schedules or watches by name."""

"""How the pipeline runs outside a plain terminal: local services, work pools, automations."""

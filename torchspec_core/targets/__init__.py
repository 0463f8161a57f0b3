"""The target model: its facts, the folder it becomes, its engines, its answers."""

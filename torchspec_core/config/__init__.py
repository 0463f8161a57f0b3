"""The recipe: one YAML file, one typed object.

`load` reads a recipe (with `base:` and dotted overrides) and refuses what it does not know; `Recipe` is the typed
result.
"""

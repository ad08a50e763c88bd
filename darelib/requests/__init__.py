"""The user's request: TOML, flags, mergekit's YAML, a recipe."""

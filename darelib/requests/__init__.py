"""What a user asked for: TOML, flags, mergekit's YAML, a recipe."""

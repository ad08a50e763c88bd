"""How weights come in: tensor files, checkpoints, adapters, packed, FP8, the Hub, state dicts in memory."""

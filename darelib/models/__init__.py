"""How weights come in: checkpoints, adapters, packed, FP8, the Hub, state dicts in memory."""

"""How a merged model is written: with its recipe, under a lock, complete or not at all."""

"""How a merged model is written: where to, under a lock, with a journal, complete or not at all, with its recipe."""

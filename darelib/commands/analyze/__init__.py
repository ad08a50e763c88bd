"""What the models are like, and what that says about how to merge them."""

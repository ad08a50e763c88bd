"""Errors and words, number types, the mask, drops, arrays: the ground of all other floors."""

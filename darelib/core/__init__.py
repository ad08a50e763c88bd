"""Errors and words, number types, the mask, gradients, drops, methods: with every formula."""

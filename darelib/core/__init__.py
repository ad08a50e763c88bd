"""Words and errors, stored number types, the mask, gradients, drops, methods: what can be chosen, with every formula."""

"""The arithmetic: one definition, and engines that give its very bits."""

"""Which models change which tensors, and how; jobs; files: all that is known before a byte is
written.
"""

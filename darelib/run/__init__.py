"""Who does the jobs of a merge: threads, parts on several machines, a Ray cluster; or torch, for tensors in memory."""

"""Several machines: the engine as replicas of Ray Serve. What decides is in `decide`, without Ray."""

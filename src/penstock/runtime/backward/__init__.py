"""Split backward: weight gradients deferred from I to W."""

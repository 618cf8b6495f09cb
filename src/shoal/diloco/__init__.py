"""Low-communication training: inner steps at every site, one outer step on the average of what they moved."""

"""The command line: the only reader of argv, TOML and the environment. Builds rooms and joins them."""

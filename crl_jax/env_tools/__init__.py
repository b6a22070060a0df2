"""What ``crl envs`` does, one module for each command."""

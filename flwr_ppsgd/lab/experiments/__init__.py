"""Experiments that ship with the package: one TOML file each."""

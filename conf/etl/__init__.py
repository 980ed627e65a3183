"""Config of `sluice build`, a file per part."""

"""Checks of a release: it installs, its parts are listed, licensed and not known to be unsafe."""

"""Servers and peers that `make test-all` tests against, each installed in a folder of its own."""

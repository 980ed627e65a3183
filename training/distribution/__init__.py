"""Devices and processes: replicas, several workers, parameter servers."""

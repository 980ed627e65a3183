"""Devices and processes: replicas, several workers."""

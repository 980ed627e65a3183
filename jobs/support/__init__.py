"""Support of the commands: the Spark session, launched workers, terminal, trained runs."""

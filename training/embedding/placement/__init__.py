"""Where the rows of a table are: on the device or in host memory, and at which worker."""

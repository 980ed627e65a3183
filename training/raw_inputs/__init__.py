"""Raw values of rows and requests, as a model takes them."""

"""What a checkout needs beside the product: its documentation's site and its releases."""

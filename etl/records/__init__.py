"""Records: the rows of every split, their shards, and the writing of them."""

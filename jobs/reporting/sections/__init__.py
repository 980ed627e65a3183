"""The report's sections: each turns a run into blocks, and says so where its part is missing."""
